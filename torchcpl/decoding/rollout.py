"""The sequential process itself: pick, update the state, pick again, until the stop is chosen.

Greedy and sampling differ only in how a step chooses. On CUDA the host synchronises only every 32 steps, to end early
once every hypothesis has stopped. Under ``torch.compile`` and ``torch.export`` the loop is one ``while_loop`` of the
graph, for any size.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcpl.checks import capturing
from torchcpl.constraints import History, Rules
from torchcpl.functional import blame_nan, start_state, step_log_probs
from torchcpl.interactions.base import State, accumulator
from torchcpl.potentials import Potentials, Selection

SYNC_EVERY = 32  # steps between tests of whether all have stopped, where a test makes the host wait

Choose = Callable[[Tensor], Tensor]  # log-probabilities (B, K, N+1) to choices (B, K), N = the stop


class Hypotheses(NamedTuple):
    """K hypotheses a row after some steps."""

    marks: Tensor  # (B, K, N+1) bool: picked; in the last column, stopped
    last: Tensor  # (B, K) the latest pick, −1 when there is none
    length: Tensor  # (B, K) how many picks
    log_prob: Tensor  # (B, K)
    state: State  # of the interaction

    @property
    def history(self) -> History:
        return History(self.marks[..., :-1], self.last, self.length)

    @property
    def stopped(self) -> Tensor:
        return self.marks[..., -1]  # (B, K)

    def after(self, choice: Tensor, gain: Tensor) -> tuple[Hypotheses, Tensor, Tensor]:
        """Them after a choice (B, K) of log-probability ``gain``, the state as it was; the pick and its gain.

        Where the choice was the stop, N, these are −1 and 0.
        """
        marks = self.marks.scatter(-1, choice.unsqueeze(-1), True)
        stopped = marks[..., -1]
        pick = choice.masked_fill(stopped, -1)
        last = self.last.where(stopped, pick)
        now = Hypotheses(marks, last, self.length + ~stopped, self.log_prob + gain, self.state)
        return now, pick, gain.masked_fill(stopped, 0)


def begin(pot: Potentials, rules: Rules, width: int) -> tuple[Hypotheses, Tensor, Tensor]:
    """``width`` hypotheses a row with nothing picked, and room for their picks and the gains of these (B, K, T)."""
    batch, n = pot.unary.shape
    marks = torch.zeros(batch, width, n + 1, dtype=torch.bool, device=pot.unary.device)
    last = torch.full((batch, width), -1, dtype=torch.long, device=marks.device)
    log_prob = torch.zeros(batch, width, dtype=accumulator(pot.unary.dtype), device=marks.device)
    room = (batch, width, rules.max_len)
    now = Hypotheses(marks, last, torch.zeros_like(last), log_prob, start_state(pot, rules, width))
    return now, last.new_full(room, -1), log_prob.new_zeros(room)


def rollout(pot: Potentials, rules: Rules, width: int, choose: Choose) -> Selection:
    """Run ``width`` hypotheses a row: (B, K, T)."""
    now, indices, gains = begin(pot, rules, width)
    if torch.compiler.is_compiling() and pot.interaction.depends_on != "order":  # a loop's state cannot grow
        now, indices, gains = _traced_loop(pot, rules, choose, now, indices, gains)
    else:
        for t in range(rules.max_len):
            if may_test(t, indices.device) and bool(now.stopped.all()):
                break
            now, indices[..., t], gains[..., t] = _step(pot, rules, choose, now)
            if t + 1 < rules.max_len:
                now = now._replace(state=pot.interaction.advance(now.state, indices[..., t]))
    # A hypothesis that reached max_len stops with certainty.
    lengths = (indices >= 0).sum(-1)
    return Selection(indices, lengths, blame_nan(now.log_prob, pot), pot.num_candidates, step_log_prob=gains)


def _traced_loop(
    pot: Potentials, rules: Rules, choose: Choose, begun: Hypotheses, indices: Tensor, gains: Tensor
) -> tuple[Hypotheses, Tensor, Tensor]:
    """The loop as one ``while_loop`` of the graph: the hypotheses at the end, indices and gains (B, K, T)."""
    from torch._higher_order_ops import while_loop

    # while_loop refuses inputs that alias, as keys and stop_key of one head do. Contiguous: the ambiguous strides of a
    # batch of one would be taken for symbolic sizes.
    pot = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(memory_format=torch.contiguous_format), pot)
    limit = torch.full((), rules.max_len, device=indices.device)

    def going(t: Tensor, indices: Tensor, gains: Tensor, now: Hypotheses) -> Tensor:
        return (t < limit) & ~now.stopped.all()

    def body(t: Tensor, indices: Tensor, gains: Tensor, now: Hypotheses) -> tuple[Tensor, Tensor, Tensor, Hypotheses]:
        inside = copy(rules)
        inside.max_len = indices.shape[-1]  # symbolic in the loop's own graph
        now, pick, gain = _step(pot, inside, choose, now)
        now = now._replace(state=pot.interaction.advance(now.state, pick))
        at = t.expand(pick.shape).unsqueeze(-1)
        return t + 1, indices.scatter(-1, at, pick.unsqueeze(-1)), gains.scatter(-1, at, gain.unsqueeze(-1)), now

    start = torch.zeros((), dtype=torch.long, device=indices.device)
    _, indices, gains, now = while_loop(going, body, (start, indices, gains, begun))
    return now, indices, gains


def _step(pot: Potentials, rules: Rules, choose: Choose, now: Hypotheses) -> tuple[Hypotheses, Tensor, Tensor]:
    """One choice of every hypothesis: the pick (B, K), −1 for the stop, and its log-probability (B, K)."""
    log_probs = step_log_probs(pot, now.state, now.history, rules)
    choice = choose(log_probs).masked_fill(now.stopped, pot.num_candidates)
    gain = log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1).masked_fill(now.stopped, 0)
    return now.after(choice, gain)


def refuse_tracing() -> None:
    """Raise inside ``torch.jit.trace``, which would record the picks of its example as constants."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise ValueError("decoding: expected an eager call, torch.compile or torch.export, got torch.jit.trace")


def may_test(step: int, device: torch.device) -> bool:
    """Whether to test, before this step, if all hypotheses have stopped."""
    if capturing() or torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or step % SYNC_EVERY == SYNC_EVERY - 1


def samples_first(selection: Selection) -> Selection:
    """(B, S, T) → (S, B, T), samples first as in torch.distributions."""
    return selection.map(lambda part: part.transpose(0, 1))
