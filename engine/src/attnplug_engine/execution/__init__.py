"""Execution of steps: model runner, sampler, steps in flight."""
