"""Other ways to the results of the slicing benchmarks: torch's, and on a GPU FlashInfer's where it is installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..runtime import log
from ..runtime.clocks import Function
from .types import Selection

if TYPE_CHECKING:
    from .benches import Inputs

Tensor = torch.Tensor

PEERS = {
    "P1": "torch's scaled_dot_product_attention with enable_gqa, on caches in order",
    "P2": "the same with the heads of a group as query rows",
    "gather+SDPA": "torch.gather of the same tokens, then P2 on them",
    "FlashInfer": "its decode on the same pages",
}


def as_rows(q: Tensor, heads: int) -> Tensor:
    """The query heads of a group as query rows: [B,1,Hq,D] -> [B,Hkv,G,D]."""
    return q[:, 0].unflatten(1, (heads, -1))


def index_of(selection: Selection) -> Tensor:
    """i64[B,Hkv,count] of a selection whose rows all list the same number of tokens."""
    return selection.indices[:, 0, :, : int(selection.counts.min())].long()


class Peers:
    """Torch's ways to the same results on set i. Caches in order, which is what serves torch best."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.heads = inputs, inputs.shape.heads

    def p1(self, i: int) -> Tensor:
        """Scaled dot product attention with enable_gqa."""
        k, v = self.inputs.in_order(i)
        return F.scaled_dot_product_attention(self.inputs.q[i].transpose(1, 2), k, v, enable_gqa=True)

    def p2(self, i: int) -> Tensor:
        """The same with the G heads of a group as query rows."""
        return F.scaled_dot_product_attention(as_rows(self.inputs.q[i], self.heads), *self.inputs.in_order(i))

    def gather(self, i: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """torch.gather of K and V at index i64[B,Hkv,K]."""
        k, v = self.inputs.in_order(i)
        where = index[..., None].expand(*index.shape, k.shape[-1])
        return torch.gather(k, 2, where), torch.gather(v, 2, where)

    def gather_p2(self, i: int, index: Tensor) -> Tensor:
        """Attention over what torch.gather copied."""
        return F.scaled_dot_product_attention(as_rows(self.inputs.q[i], self.heads), *self.gather(i, index))

    def dense(self) -> dict[str, Function]:
        """Dense attention, by name."""
        found: dict[str, Function] = {"P1": self.p1, "P2": self.p2}
        if self.inputs.device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None:
            try:
                found["FlashInfer"] = FlashInfer(self.inputs)
                found["FlashInfer"](0)
            except Exception as error:  # it compiles kernels when first used, which a machine may not allow
                log.get_logger("bench").warning("FlashInfer is left out: %s: %s", type(error).__name__, error)
                found.pop("FlashInfer", None)
        return found


class FlashInfer:
    """FlashInfer's decode on the same pages; planned once for each set, as its users do."""

    WORKSPACE = 128 << 20

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        workspace = torch.empty(self.WORKSPACE, dtype=torch.uint8, device=inputs.device)
        self.plans = [self._plan(i, workspace) for i in range(inputs.sets)]

    def _plan(self, i: int, workspace: Tensor) -> Any:
        import flashinfer

        s, x = self.inputs.shape, self.inputs
        plan = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=s.group >= 4)
        pages = torch.arange(0, (s.B + 1) * x.M, x.M, dtype=torch.int32, device=x.device)
        last = torch.full((s.B,), s.length - (x.M - 1) * s.page, dtype=torch.int32, device=x.device)
        plan.plan(pages, x.tables[i].flatten(), last, s.heads * s.group, s.heads, s.D, s.page,
                  q_data_type=s.dtype, kv_data_type=s.dtype)  # fmt: skip
        return plan

    def __call__(self, i: int) -> Tensor:
        x = self.inputs
        return self.plans[i].run(x.q[i][:, 0], (x.k_cache, x.v_cache))
