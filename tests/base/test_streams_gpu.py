from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecore.base.streams import create_event, create_stream, get_current_stream, use_stream

pytestmark = pytest.mark.gpu

GPU = "cuda"
PAUSE = 40_000_000  # cycles: 20 ms


def recorded_here(_: Any) -> torch.Event:
    (event := create_event(GPU)).record()
    return event


STREAMS: dict[str, Callable[[], Any]] = {
    "the default one": lambda: torch.cuda.default_stream(),
    "ours": lambda: create_stream(GPU),
    "a caller's": lambda: torch.cuda.Stream(),
}
EVENTS: dict[str, Callable[[Any], Any]] = {
    "of the stream": lambda stream: stream.record_event(),
    "of the current one": lambda _: get_current_stream(GPU).record_event(),
    "again and again": recorded_here,
    "a caller's": lambda stream: torch.cuda.current_stream().record_event(),
}
WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "stream": lambda stream, event: stream.wait_event(event),
    "current stream": lambda stream, event: get_current_stream(GPU).wait_event(event),
    "event": lambda stream, event: event.wait(),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("last", STREAMS)
@pytest.mark.parametrize("first", STREAMS)
def test_one_waits_for_the_other(first: str, last: str, event: str, wait: str) -> None:
    before, after = STREAMS[first](), STREAMS[last]()
    x = torch.zeros(1, device=GPU)
    torch.cuda.synchronize()
    with use_stream(before):
        torch.cuda._sleep(PAUSE)
        x.fill_(1)
        reached = EVENTS[event](before)
    with use_stream(after):
        WAITS[wait](after, reached)
        found = x.clone()
    torch.cuda.synchronize()
    assert found.item() == 1


@pytest.mark.parametrize("name", STREAMS)
def test_the_current_stream_is_the_one_that_was_set(name: str) -> None:
    stream, before = STREAMS[name](), torch.cuda.current_stream()
    with use_stream(stream):
        assert get_current_stream(GPU) == stream == torch.cuda.current_stream()
        side = create_stream(GPU)
        side.wait_stream(get_current_stream(GPU))
    assert get_current_stream(GPU) == before == torch.cuda.current_stream()
