"""Which calls are kept from filling a cache: those whose callee takes `use_cache`, whatever the model takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from moreh_ap.runtime.worker.cache_arguments import without_cache


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)

    def forward(self, ids: Any, use_cache: bool = True) -> Any:
        return self.embedding(ids)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, ids: Any, **kwargs: Any) -> Any:
        return self.decoder(ids, **kwargs)


def test_a_module_is_told_that_takes_the_keyword_or_hands_it_on():
    assert without_cache(Decoder(), {"ids": 1}) == {"ids": 1, "use_cache": False}
    assert without_cache(Wrapper(), {}) == {"use_cache": False}
    assert without_cache(Decoder().forward, {"use_cache": True}) == {"use_cache": False}


def test_a_submodule_without_the_keyword_is_not_told():
    assert without_cache(Decoder().embedding, {"input": 1}) == {"input": 1}
    assert without_cache(nn.Sequential(Decoder()), {}) == {}
