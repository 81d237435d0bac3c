"""A decode captured where one backend prefills MLA and another decodes it."""

from __future__ import annotations

import pytest

from attnplug import BackendContext, ForwardMode, GraphLevel
from attnplug.host import SplitBackend
from support.mla_capture import check_replays, replay_scenes
from support.mla_plugins import PLUGINS
from support.mla_scene import MLACase


@pytest.mark.parametrize("name", ["flashmla", "flashinfer_mla", "triton_mla"])
def test_a_decode_is_captured_beside_flashattentions_prefill(name):
    """A9: the graphs are the decode backend's, and the prefill backend is in nobody's way."""

    def build(context: BackendContext) -> SplitBackend:
        split = SplitBackend(PLUGINS["flashattention"].build(context), PLUGINS[name].build(context))
        assert split.claims.cuda_graph is GraphLevel.DECODE
        return split

    case = PLUGINS[name].case(MLACase(((0, 1),), ForwardMode.DECODE, page_size=64, heads=16))
    check_replays(*replay_scenes(case, "cpu", build))
