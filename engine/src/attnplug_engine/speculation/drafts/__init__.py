"""Draft models: those that propose tokens, and how they are read from checkpoints."""

from attnplug_engine.speculation.drafts.loading import draft_spec, load_draft, naming_draft
from attnplug_engine.speculation.drafts.model import LAST, NOTHING, DraftError, DraftModel, Takes

__all__ = ["LAST", "NOTHING", "DraftError", "DraftModel", "Takes", "draft_spec", "load_draft", "naming_draft"]
