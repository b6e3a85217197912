import re

import pytest
from benchmarks.lora_plans import BEGIN, END, GPUS, MARGIN, MODELS, PAGE, format_table, plan_bytes

from moecore.planning.gpus import get_gpu

pytest.importorskip("peft", minversion="0.21", reason="plans have its adapters")
TABLE = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
ROWS = re.findall(r"^\| (\S+) \| (\S+) \| (.*) \| ([\d.]+) \|$", TABLE, flags=re.MULTILINE)


def test_a_row_of_the_page_is_a_plan_that_fits() -> None:
    assert [row[:2] for row in ROWS] == [(model, gpu) for model in MODELS for gpu in GPUS]
    model, gpu, options, peak = ROWS[0]
    num_bytes = plan_bytes(model, options.strip("`"))
    assert float(peak) == pytest.approx(num_bytes / 2**30, abs=0.06)
    assert num_bytes * MARGIN <= get_gpu(gpu).memory


@pytest.mark.nightly
@pytest.mark.slow  # twenty plans of models of full size
def test_the_page_has_the_table_of_the_plans() -> None:
    assert format_table().strip() == TABLE
