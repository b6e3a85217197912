import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from moecore.families.transformers.fused_modules import fuse_norms, is_rms_norm

PLAIN = ("qwen3_moe.Qwen3Moe", "deepseek_v3.DeepseekV3", "gpt_oss.GptOss", "gemma4.Gemma4")
# One plus the weight; with a gate.
OTHERS = ("gemma2.Gemma2RMSNorm", "qwen3_next.Qwen3NextRMSNorm", "qwen3_next.Qwen3NextRMSNormGated")


def norm_class(name: str) -> Any:
    family, _, cls = name.partition(".")
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), cls)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_are_told_by_what_they_compute(device: str) -> None:
    with torch.device(device):
        assert all(is_rms_norm(norm_class(f"{name}RMSNorm")(24)) for name in PLAIN)
        assert not any(is_rms_norm(norm_class(name)(24)) for name in OTHERS)
        llama = norm_class("qwen3_moe.Qwen3MoeRMSNorm")

        class WithoutEps(llama):  # type: ignore[misc, valid-type]
            def forward(self, x: Tensor) -> Tensor:
                return self.weight * x * x.pow(2).mean(-1, keepdim=True).rsqrt()

        assert not is_rms_norm(WithoutEps(24)), "it differs where elements are small"


def test_on_cpus_a_norm_is_the_models_own() -> None:
    norm = norm_class("qwen3_moe.Qwen3MoeRMSNorm")(24)
    x = torch.randn(3, 24)
    expected = norm(x)
    fuse_norms(norm)
    assert "forward" in vars(norm) and torch.equal(norm(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 2048), (5, 32, 128)])
def test_fused_is_no_further_from_fp64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    own, fused = (norm_class("qwen3_moe.Qwen3MoeRMSNorm")(shape[-1]).cuda() for _ in range(2))
    fuse_norms(nn.ModuleList([fused]))
    x, dy = torch.randn(2, *shape, device="cuda").to(torch.bfloat16)
    weight = (1 + 0.1 * torch.randn(shape[-1], device="cuda")).to(torch.bfloat16)

    def results(norm: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = functional_call(norm, {"weight": inputs[1]}, (inputs[0],))
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]

    exact = results(own, torch.float32)
    for found, stock, wanted in zip(
        results(fused, torch.bfloat16), results(own, torch.bfloat16), exact, strict=True
    ):
        assert (found - wanted).norm() <= 1.05 * (stock - wanted).norm()
        assert (found - wanted).abs().max() <= 2 * (stock - wanted).abs().max()
    assert torch.equal(fused(x), own(x)), "a weight in another dtype: the class's own code"
