import pytest
from benchmarks.hf_configs import make_hf_config

from moecore.io import decoder_config_from_hf
from moecore.models import preset

pytest.importorskip("transformers", minversion="5", reason="its classes have these configs")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "moonlight-16b-a3b"])
def test_a_config_has_the_sizes_of_its_preset(name: str) -> None:
    assert decoder_config_from_hf(make_hf_config(name).to_dict()) == preset(name)
    assert make_hf_config(name, 3).num_hidden_layers == 3


def test_other_families_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--preset \(deepseek-v3\) must be one of Qwen3-MoE"):
        make_hf_config("deepseek-v3")
