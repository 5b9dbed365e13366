"""Muon for the matrices and Adam for the rest, on lists of tensors and without a host sync."""

import torch
from torch import Tensor

from models.tiny.training.parameters import Parameter

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al., "Muon", 2024


def orthogonalise(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Move the singular values of each [rows <= columns] matrix towards 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class Muon:
    """Momentum, orthogonalised over all matrices of one shape at once."""

    def __init__(self, values: list[Tensor], momentum: float = 0.95, decay: float = 0.02) -> None:
        self._values = values
        self._momentum, self._decay = momentum, decay
        self._buffers = [torch.zeros_like(value) for value in values]
        self._indices_by_shape: dict[tuple[int, int], list[int]] = {}
        for index, value in enumerate(values):
            rows, columns = value.shape[-2:]
            shape = (min(rows, columns), max(rows, columns))
            self._indices_by_shape.setdefault(shape, []).append(index)

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: Tensor) -> None:
        """Update the values in place."""
        torch._foreach_lerp_(self._buffers, grads, 1 - self._momentum)
        updates = torch._foreach_lerp(grads, self._buffers, self._momentum)
        for shape, indices in self._indices_by_shape.items():
            stacks = [self._wide(updates[index]).reshape(-1, *shape) for index in indices]
            done = orthogonalise(torch.cat(stacks)).split([len(stack) for stack in stacks])
            for index, update in zip(indices, done, strict=True):
                value = self._values[index]
                rows, columns = value.shape[-2:]
                turned = update.mT if rows > columns else update
                step = turned.reshape(value.shape) * max(1.0, rows / columns) ** 0.5
                value.sub_(lr * (step + self._decay * value))

    @staticmethod
    def _wide(update: Tensor) -> Tensor:
        return update.mT if update.shape[-2] > update.shape[-1] else update


class Adam:
    """Adam with one clip over the whole list; `lr_scales` gives each value its own rate."""

    def __init__(self, values: list[Tensor], lr_scales: list[float], max_norm: float = 1.0) -> None:
        self._values, self._max_norm = values, max_norm
        self._lr_scales = lr_scales
        self._first = [torch.zeros_like(value) for value in values]
        self._second = [torch.zeros_like(value) for value in values]
        self._num_steps = torch.zeros((), device=values[0].device)

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: Tensor) -> Tensor:
        """Update the values in place and return the norm of the gradient."""
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        grads = torch._foreach_mul(grads, (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
        beta1, beta2 = 0.9, 0.98
        self._num_steps += 1
        torch._foreach_lerp_(self._first, grads, 1 - beta1)
        torch._foreach_mul_(self._second, beta2)
        torch._foreach_addcmul_(self._second, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_mul_(roots, (1 - beta2**self._num_steps).rsqrt())
        torch._foreach_add_(roots, 1e-10)
        updates = torch._foreach_div(self._first, roots)
        torch._foreach_mul_(updates, self._lr_scales)
        torch._foreach_mul_(updates, lr / (1 - beta1**self._num_steps))
        torch._foreach_sub_(self._values, updates)
        return norm


class Optimiser:
    """Splits the parameters between Muon and Adam."""

    def __init__(
        self,
        values: dict[str, Tensor],
        parameters: dict[str, Parameter],
        muon_lr: float,
        adam_lr: float,
    ) -> None:
        self.names = list(parameters)
        self._muon_lr, self._adam_lr = muon_lr, adam_lr
        self._uses_muon = [parameters[name].uses_muon for name in self.names]
        muon = [values[name] for name in self.names if parameters[name].uses_muon]
        others = [name for name in self.names if not parameters[name].uses_muon]
        self._muon = Muon(muon)
        self._adam = Adam([values[n] for n in others], [parameters[n].lr_scale for n in others])

    def step(self, grads: list[Tensor], lr_share: Tensor) -> Tensor:
        """Update the parameters in place; return the norm of Adam's part of the gradient."""
        pairs = list(zip(grads, self._uses_muon, strict=True))
        self._muon.step([g for g, is_muon in pairs if is_muon], lr_share * self._muon_lr)
        return self._adam.step([g for g, is_muon in pairs if not is_muon], lr_share * self._adam_lr)
