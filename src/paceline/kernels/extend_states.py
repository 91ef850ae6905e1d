"""extend_states: rows of a step that read a matrix per head, each behind its ancestors.

A row with key k, value v, log decay g and rate beta makes of the state S [key_dim, value_dim]

    S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   out = S^T q       the delta rule
    S = exp(g) S;   u = v                                                      without rates

Of many rows at once that is a product with a mask, `sees`: row i sees row j where j is i or an
ancestor of it.  G_i sums g from the first row of i's branch to i, D_ij = exp(G_i - G_j) where i
sees j, else 0; then

    (I + strict(beta_i (k_i . k_j) D_ij)) U = beta (v - exp(G) k S)
    out = exp(G) q S + ((q_i . k_j) D_ij) U
    S behind a chain = exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T

Rows follow their ancestors, so what is solved is lower triangular.  A chunk is rows that are
computed so; a request's chunks follow on one another through its state.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op


class StateRows(NamedTuple):
    """What the rows of a step bring to one layer."""

    q: Tensor  # [tokens, key_heads, key_dim]  scaled
    k: Tensor  # [tokens, key_heads, key_dim]
    v: Tensor  # [tokens, value_heads, value_dim]
    decay: Tensor  # [tokens, value_heads]  float32  log; at most 0
    beta: Tensor | None  # [tokens, value_heads]  float32; None: no delta rule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """The rows of a ragged step, cut; a request's first chunk stands before its second."""

    reqs: Tensor  # [chunks]  int64  whose; behind the last the number of requests
    rows: Tensor  # [chunks, size]  int64
    live: Tensor  # [chunks, size]  bool  whether the place holds a row
    places: Tensor  # [tokens]  int64  of each row among all places


class Extended(NamedTuple):
    """What the rows of a step come to."""

    out: Tensor  # [tokens, value_heads, value_dim]  float32
    states: Tensor  # [reqs, value_heads, key_dim, value_dim]  float32  behind each one's last row
    u: Tensor | None  # [tokens, value_heads, value_dim]  float32  None: rows were cut
    decay: Tensor | None  # [tokens, value_heads]  float32  summed along the branch; likewise


def extend_states_reference(
    rows: StateRows, states: Tensor, sees: Tensor, chunks: Chunks | None
) -> Extended:
    """The definition, and the CPU's path.

    states: [reqs, value_heads, key_dim, value_dim] float32, before the step; sees: [reqs or 1,
    size, size] bool, of the rows of a chunk; chunks: None where all requests bring `size` rows, a
    chunk each.  Mutates nothing.  Device-only, static shapes.
    """
    if chunks is None:
        size = sees.shape[-1]
        terms = _terms(_by_chunk(rows, size), sees)
        out, behind, u = _through(terms, states)
        return Extended(_flat(out), behind, _flat(u), _flat(terms.decay).squeeze(2))
    size = chunks.rows.shape[1]
    hidden, taken = ~chunks.live.flatten(), chunks.rows.flatten()

    def cut(each: Tensor) -> Tensor:
        gone = hidden.view(-1, *(1,) * (each.dim() - 1))
        return each.index_select(0, taken).masked_fill(gone, 0.0)

    beta = None if rows.beta is None else cut(rows.beta)
    placed = StateRows(cut(rows.q), cut(rows.k), cut(rows.v), cut(rows.decay), beta)
    terms = _terms(_by_chunk(placed, size), sees)
    held = torch.cat((states, torch.zeros_like(states[:1])))  # nobody's is the last
    outs = torch.empty_like(terms.value)
    _SCAN_CHUNKS(*terms, chunks.reqs, held, outs)
    return Extended(_flat(outs).index_select(0, chunks.places), held[:-1], None, None)


class _Terms(NamedTuple):
    """What chunks are but for the states before them; k: key head, n: value head of it."""

    attend: Tensor  # [chunks, k, n, size, size]  (q_i . k_j) D_ij
    read: Tensor  # [chunks, k, n, size, key_dim]  exp(G) q
    write: Tensor  # [chunks, k, n, size, key_dim]  exp(G_last - G) k
    forget: Tensor  # [chunks, k, n, 1, 1]  exp(G_last)
    value: Tensor  # [chunks, k, n, size, value_dim]  of u, what states have no part in
    erase: Tensor | None  # [chunks, k, n, size, key_dim]  of u, what the state is read by
    decay: Tensor  # [chunks, k, n, size, 1]  G

    def of(self, chunk: int) -> "_Terms":
        one = slice(chunk, chunk + 1)
        return _Terms(
            attend=self.attend[one],
            read=self.read[one],
            write=self.write[one],
            forget=self.forget[one],
            value=self.value[one],
            erase=None if self.erase is None else self.erase[one],
            decay=self.decay[one],
        )


def _scan_chunks(*given: Any) -> None:
    """One chunk after another, each through the state of its request."""
    *terms, reqs, held, outs = given
    each = _Terms(*terms)
    for index, req in enumerate(reqs.split(1)):
        out, behind, _ = _through(each.of(index), held.index_select(0, req))
        held.index_copy_(0, req, behind)
        outs[index : index + 1] = out


# One operator, so that who rehearses or records a step does not meet each chunk.
_SCAN_CHUNKS = define_op(
    "scan_chunks(Tensor attend, Tensor read, Tensor write, Tensor forget, Tensor value, "
    "Tensor? erase, Tensor decay, Tensor reqs, Tensor(a!) held, Tensor(b!) outs) -> ()",
    cpu=_scan_chunks,
    cuda=_scan_chunks,
)


def _by_chunk(rows: StateRows, size: int) -> StateRows:
    """Each [chunks, k, n or 1, size, numbers or 1] float32."""
    heads = rows.k.shape[1]

    def cut(each: Tensor) -> Tensor:
        chunks = each.float().view(-1, size, heads, each.shape[1] // heads, *each.shape[2:])
        chunks = chunks if each.dim() == 3 else chunks.unsqueeze(-1)
        return chunks.permute(0, 2, 3, 1, 4)

    beta = None if rows.beta is None else cut(rows.beta)
    return StateRows(cut(rows.q), cut(rows.k), cut(rows.v), cut(rows.decay), beta)


def _flat(each: Tensor) -> Tensor:
    """[chunks, k, n, size, numbers] -> [chunks * size, heads, numbers]"""
    return each.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _terms(rows: StateRows, sees: Tensor) -> _Terms:
    sees = sees[:, None, None]  # [chunks or 1, 1, 1, size, size]
    decay = sees.float() @ rows.decay
    apart = (decay - decay.mT).masked_fill(~sees, -torch.inf).exp()
    behind = decay[..., -1:, :]
    kept = decay.exp()
    value, erase = rows.v, None
    if rows.beta is not None:
        erase = rows.beta * kept * rows.k
        value = rows.beta * value
        if sees.shape[-1] > 1:
            solved = torch.linalg.solve_triangular(
                rows.beta * (rows.k @ rows.k.mT) * apart,
                torch.cat((value, erase), dim=-1),
                upper=False,
                unitriangular=True,
            )
            value, erase = solved.split((value.shape[-1], erase.shape[-1]), dim=-1)
    return _Terms(
        attend=(rows.q @ rows.k.mT) * apart,
        read=kept * rows.q,
        write=(behind - decay).exp() * rows.k,
        forget=behind.exp(),
        value=value,
        erase=erase,
        decay=decay,
    )


def _through(terms: _Terms, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out [chunks, k, n, size, value_dim], the states behind, u as out)."""
    before = states.view(*terms.forget.shape[:3], *states.shape[2:])
    u = terms.value if terms.erase is None else terms.value - terms.erase @ before
    out = terms.read @ before + terms.attend @ u
    behind = terms.forget * before + terms.write.mT @ u
    return out, behind.flatten(1, 2), u
