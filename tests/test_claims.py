from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from tools.claims import PAGES, ROOT, Claim, claim_problem, find_figures, read_claims, read_settings

CLAIMS = read_claims()
SETTINGS = read_settings()


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_claim_is_what_its_record_has(claim: Claim) -> None:
    assert claim_problem(claim, CLAIMS) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_of_a_page_is_a_claim_or_a_setting(page: Path) -> None:
    known = {claim.figure for claim in CLAIMS.values() if claim.status != "superseded"}
    settings = SETTINGS.get(str(page.relative_to(ROOT)), set())
    figures = list(find_figures(page.read_text()))
    assert [(line, figure) for line, figure in figures if figure not in known | settings] == []
    assert settings <= {figure for _, figure in figures}


def test_every_claim_is_on_a_page() -> None:
    figures = {figure for page in PAGES for _, figure in find_figures(page.read_text())}
    stale = [c.id for c in CLAIMS.values() if (c.figure in figures) == (c.status == "superseded")]
    assert stale == [] and set(SETTINGS) <= {str(page.relative_to(ROOT)) for page in PAGES}


def test_figures_are_found_in_sentences_and_tables() -> None:
    text = "It took 1,002.8 ms on 8 GPUs.\n\n| loop | tokens/s | ratio |\n|---|---|---|\n"
    text += "| 48 layers, 2 GiB | 8,261 | 1.87 |\n\n```\n5 ms\n```\n1.05 times as fast as 4 rows\n"
    text += "\n| model | bf16, tokens/s per GPU | FP8 |\n|---|---|---|\n| peak, GiB | 12 | 3.5 |\n"
    units = [(str(value), unit) for _, (value, unit) in find_figures(text)]
    table = [("2", "GiB"), ("8261", "tokens/s"), ("1.87", "ratio")]
    by_row = [("12", "tokens/s"), ("3.5", "GiB")]
    assert units == [("1002.8", "ms"), *table, ("1.05", "ratio"), *by_row]


def test_wrong_claims_are_told() -> None:
    claim = CLAIMS["moecore-3-layers-1-rows"]
    assert "must be that of its record" in str(claim_problem(replace(claim, value="66.3"), CLAIMS))
    dirty = replace(
        claim,
        record="hf/2026-11-28-nvidia-h200.jsonl",
        row={"batch_size": 1, "variant": "moecore"},
        value=str(Decimal("41708")),
        field="tokens_per_second_per_gpu",
    )
    assert "uncommitted changes" in str(claim_problem(dirty, CLAIMS))
    assert "must be the id" in str(claim_problem(replace(claim, baseline="none"), CLAIMS))
    assert "must be one of" in str(claim_problem(replace(claim, status="guessed"), CLAIMS))
