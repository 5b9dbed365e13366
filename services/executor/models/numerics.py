"""Precision modes: which values are rounded where (docs/architecture.md, same bits)."""

from dataclasses import dataclass

from torch import Tensor

from kernels.quant.linear import LinearWeight, Rounding, linear
from kernels.quant.rounding import round_bf16


@dataclass(frozen=True)
class Numerics:
    """`exact`: float32 throughout. `fp32`: caches rounded. `bf16`: the released precision map.

    Products always run in float32: FP8 and FP4 weights and bfloat16 activations are exact there.
    """

    rounds_caches: bool
    bf16: bool

    @staticmethod
    def named(name: str) -> "Numerics":
        """The mode of mesh.toml's `executor.numerics`."""
        modes = {
            "exact": Numerics(rounds_caches=False, bf16=False),
            "fp32": Numerics(rounds_caches=True, bf16=False),
            "bf16": Numerics(rounds_caches=True, bf16=True),
        }
        if name not in modes:
            raise ValueError(f"numerics: {name!r} is not one of {', '.join(modes)}")
        return modes[name]

    def act(self, x: Tensor) -> Tensor:
        """A value that the released model keeps in bfloat16."""
        return round_bf16(x) if self.bf16 else x

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """A linear with bfloat16 result; its input is rounded before, if at all."""
        return linear(x, weight, bf16=self.bf16)

    def fp8_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """A linear with FP8 weights, whose input is rounded, too."""
        rounding = Rounding.FP8 if self.bf16 else Rounding.NONE
        return linear(x, weight, rounding=rounding, bf16=self.bf16)
