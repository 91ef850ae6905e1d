"""A model that is nothing but layers with states, and the watcher of the backend that runs them."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.attention.linear.inputs import INPUTS
from paceline.attention.states import StateBackend, StateLayer, StateLimits
from paceline.core.errors import KernelArgumentError
from paceline.core.model.config import LayerSpec, ModelConfig
from paceline.kernels.gated_norm import Gate, GatedRows
from paceline.kernels.step_view import GroupView, StepView
from paceline.layers.attention import StepContext
from paceline.layers.embedding import OverlaidRows
from paceline.models.decoder import Hidden, read_rows
from paceline.proof.oracle.methods.recurrence import Recurrence
from paceline.proof.oracle.states import RECURRENCES
from paceline.proof.suite.case import Case


class StateProbe(nn.Module):
    """Stands where a CausalLM stands; what a token brings, and what follows it, its id says.

    Every other layer asks for a gate, as `extend_gated` has it, and takes it back from what it
    gets, so that outputs with and without one are the same.

    table: [num_layers, ids, width]  in the case's dtype
    next_ids: [ids]  int64  the token that is sampled behind each
    gate: z [max_tokens, prod(out_shape)], rows strided; both in the case's dtype
    outs: [num_layers, max_tokens, *out_shape]  in the case's dtype
    positions: [max_tokens]  int64  as derived
    """

    def __init__(self, case: Case, *, max_tokens: int, device: torch.device) -> None:
        super().__init__()
        self._method = method = RECURRENCES[case.method]
        dtype: torch.dtype = getattr(torch, case.dtype)
        layers, ids = len(case.layers), num_ids(max_tokens)
        self.table = torch.zeros(layers, ids, method.width, dtype=dtype, device=device)
        self.next_ids = torch.zeros(ids, dtype=torch.int64, device=device)
        shape = (layers, max_tokens, *method.out_shape)
        self.outs = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        size, source = math.prod(method.out_shape), torch.Generator().manual_seed(0)
        numbers = torch.rand(max_tokens + 1, 2 * size, generator=source).add_(0.5).to(self.table)
        self.gate = Gate(numbers[1:, size:], numbers[0, :size])

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        """input_ids, positions [tokens] int64; the hidden state is the id that follows."""
        assert overlaid is None, "no cell brings input rows"
        tokens = input_ids.shape[0]
        self.positions[:tokens].copy_(positions)
        for index in range(self.table.shape[0]):
            given = _inputs(self._method, self.table[index].index_select(0, input_ids))
            found = self._ungated(index, given, ctx, tokens) if index % 2 else None
            self.outs[index, :tokens].copy_(ctx.mix(index, given) if found is None else found)
        following = self.next_ids.index_select(0, input_ids).unsqueeze(1)
        return Hidden(read_rows(following, read), {})

    def _ungated(self, index: int, given: Any, ctx: StepContext, tokens: int) -> Tensor | None:
        """[tokens, *out_shape]: a layer's output, out of what a gate made of it; scaled where the
        squares are not those of the rows.  None: its backend has no gate for the step."""
        gate = self.gate._replace(z=self.gate.z[:tokens])
        gated = ctx.mix_gated(index, given, gate)
        if gated is None:
            return None
        rows = gated.rows / gate.weight
        scale = gated.squares.sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        out: Tensor = (rows / F.silu(gate.z) * scale).unflatten(1, self._method.out_shape)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, 1] int64 -> [rows, ids] float32: the one that follows."""
        ids = torch.arange(self.next_ids.shape[0], device=hidden.device)
        return (hidden == ids).float()

    def attention_sinks(self) -> tuple[Tensor | None, ...]:
        """No layer attends."""
        return ()


def _inputs(method: Recurrence, rows: Tensor) -> Any:
    """What a backend is handed for [tokens, width] of an oracle, which shares no type with it."""
    given = method.given(rows)
    return INPUTS[method.kind](**given) if method.kind in INPUTS else given


def num_ids(max_tokens: int) -> int:
    """Of a vocabulary with one for each token of a step, and one for none and one for the end."""
    return max_tokens + 2


def state_config(case: Case, *, max_tokens: int, max_position: int) -> ModelConfig:
    """The model shape of a case."""
    method = RECURRENCES[case.method]
    layer = LayerSpec(mixer=method.kind, state=method.parts)
    return ModelConfig(
        model_type="probe",
        vocab_size=num_ids(max_tokens),
        hidden_size=1,
        intermediate_size=1,
        max_position=max_position,
        rms_norm_eps=1e-6,
        layers=(layer,) * len(case.layers),
        hidden_act="silu",
        tie_word_embeddings=False,
        eos_token_ids=(),
        dtype=case.dtype,
    )


class WatchedStates(StateBackend[Any, Any, Any]):
    """Forwards to `inner`; remembers the view planned last, refuses what extend may not return."""

    def __init__(self, inner: StateBackend, out_shape: tuple[int, ...]) -> None:
        self._inner = inner
        self._out_shape = out_shape
        self.kind, self.name = inner.kind, inner.name
        self.capabilities = inner.capabilities
        self.kept_fields = inner.kept_fields
        self.planned: StepView | None = None  # of the last call

    def make_buffers(self, limits: StateLimits) -> Any:
        return self._inner.make_buffers(limits)

    def plan(self, view: StepView, group: GroupView, buffers: Any, *, is_round: bool) -> Any:
        plan = self._inner.plan(view, group, buffers, is_round=is_round)
        self.planned = view
        return plan

    def extend(self, inputs: Any, layer: StateLayer, plan: Any) -> Tensor:
        """Raises KernelArgumentError for another form than the contract's."""
        assert self.planned is not None, "a step plans before its layers run"
        out = self._inner.extend(inputs, layer, plan)
        _require_rows("out of extend", out, (self.planned.padded_tokens, *self._out_shape))
        return out

    def extend_gated(
        self, inputs: Any, gate: Gate, layer: StateLayer, plan: Any
    ) -> GatedRows | None:
        """As `extend`; None where `inner` gates nothing."""
        assert self.planned is not None, "a step plans before its layers run"
        found = self._inner.extend_gated(inputs, gate, layer, plan)
        if found is not None:
            size = math.prod(self._out_shape)
            _require_rows("rows of extend_gated", found.rows, (self.planned.padded_tokens, size))
        return found

    def commit(
        self,
        view: StepView,
        group: GroupView,
        layer: StateLayer,
        buffers: Any,
        *,
        path: Tensor,
        num_kept: Tensor,
    ) -> None:
        self._inner.commit(view, group, layer, buffers, path=path, num_kept=num_kept)


def _require_rows(name: str, out: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        raise KernelArgumentError.about(
            name,
            expected=list(shape),
            got=list(out.shape) if isinstance(out, Tensor) else type(out).__name__,
            remedy="return a row for each token of the padded step",
        )
