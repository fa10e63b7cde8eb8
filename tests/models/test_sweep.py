"""The sweep over model types, on a few of them: equal, refused by configuration, refused by code."""

from __future__ import annotations

import pytest

from tests.models.sweep import EQUAL, REFUSED, judge, main, types


def test_types_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "llama,gpt2,gpt_oss"]) == 0
    told = capsys.readouterr().out
    assert "| equal | llama |" in told
    assert "| refused | gpt2 | it has no rotary positions" in told
    assert "| refused | gpt_oss | its attention uses s_aux" in told


@pytest.mark.parametrize(
    ("name", "reason"),
    [("jetmoe", "chooses by numbers"), ("doge", "a mask of its own"), ("mllama", "5 of 6 layers")],
)
def test_what_the_engine_would_get_wrong_is_refused_without_weights(name: str, reason: str) -> None:
    verdict = judge(name, types()[name])
    assert verdict.result == REFUSED
    assert reason in verdict.reason


def test_a_decoder_inside_a_larger_model_is_read() -> None:
    assert judge("gemma3", types()["gemma3"]).result == EQUAL
