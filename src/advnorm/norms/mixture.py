"""A mixture norm with fixed statistics: ``gmm_bn`` at test time, without scopes, for export."""

from __future__ import annotations

from torch import Tensor, nn

from advnorm.norms import functional


class MixtureNorm(nn.Module):
    """``w ⊙ x̂ + b`` with ``x̂`` the posterior-weighted standardization under fixed Gaussians (paper C, eq. 10, 20)."""

    mean_KC: Tensor
    var_KC: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, mean_KC: Tensor, var_KC: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None, eps: float
    ) -> None:
        super().__init__()
        self.register_buffer("mean_KC", mean_KC)
        self.register_buffer("var_KC", var_KC)
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = functional.accumulate_dtype(self.mean_KC)
        invstd_KC = (self.var_KC.to(dtype) + self.eps).rsqrt()
        z, _ = functional.mixture_standardize(x[None], self.mean_KC.to(dtype)[:, None], invstd_KC[:, None])
        return functional.scaled(z[0], self.weight, self.bias).to(x.dtype)
