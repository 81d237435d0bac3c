"""How Triton kernels run in tests. Called by the ``conftest.py`` of plugins that have some, before any is defined."""

from __future__ import annotations

import os

import torch


def settle_triton() -> None:
    """Without a GPU kernels are interpreted; on one, nobody else's are tuned.

    flash-linear-attention tries all of a kernel's configurations at its first use, for a minute. Any will do here.
    """
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        return
    from triton.runtime.autotuner import Autotuner

    def first_configuration(self, *args, **kwargs):
        config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = first_configuration
