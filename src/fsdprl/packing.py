"""Which rows go where: microbatches of packed tokens, even ranks, minibatches.

Plain arithmetic on lengths, made on the controller or on one rank from the same numbers. Every
function is deterministic: equal inputs give equal plans on every machine.
"""

import heapq
import random
from collections.abc import Sequence


def attention_cost(
    tokens: int, hidden: int, layers: int = 1, parameters: int | None = None
) -> float:
    """Work of one row, in units of the work that one token does outside attention.

    Matrix products cost 2 * parameters per token; causal attention costs 2 * layers * hidden *
    tokens^2 a row (scores and weighted values, half of the square). Their ratio gives
    tokens + tokens^2 * layers * hidden / parameters.

    hidden: attention width (heads * head size). parameters: None takes the usual
    12 * layers * hidden^2 of a transformer body.
    """
    if parameters is None:
        parameters = 12 * layers * hidden * hidden
    return tokens + tokens * tokens * layers * hidden / parameters


def pack_rows(tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of each microbatch, at most `budget` tokens in each (first-fit decreasing).

    A row longer than the budget gets a microbatch of its own. Rows inside a microbatch ascend, and
    microbatches are ordered by their first row. At most 11/9 of the fewest possible microbatches,
    plus one (Johnson 1973), when no row exceeds the budget.

    Raises ValueError for a budget or a row below one token.
    """
    if budget < 1:
        raise ValueError(f"a microbatch needs a budget of at least 1 token, got {budget}")
    bad = next((row for row, length in enumerate(tokens) if length < 1), None)
    if bad is not None:
        raise ValueError(f"row {bad} has {tokens[bad]} tokens; a row needs at least 1")
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        home = next((i for i, free in enumerate(room) if free >= tokens[row]), None)
        if home is None:
            bins.append([row])
            room.append(budget - tokens[row])
        else:
            bins[home].append(row)
            room[home] -= tokens[row]
    return sorted(sorted(rows) for rows in bins)


def _units_in_order(units: Sequence[int]) -> list[list[int]]:
    """Rows of each unit, units in order of first appearance."""
    rows_of: dict[int, list[int]] = {}
    for row, unit in enumerate(units):
        rows_of.setdefault(int(unit), []).append(row)
    return list(rows_of.values())


def balance(costs: Sequence[float], units: Sequence[int], ranks: int) -> list[int]:
    """Rank of each row, such that rows of one unit share a rank and ranks cost about the same.

    The largest differencing method (Karmarkar and Karp 1982): the two most uneven partial plans
    are merged, dear shares onto cheap ones, until one plan is left. The dearest and the cheapest
    rank then differ by at most the dearest unit. Ranks are numbered by their first row.

    costs, units: one entry per row; costs are not negative.
    """
    if ranks < 1:
        raise ValueError(f"rows need at least 1 rank, got {ranks}")
    if len(costs) != len(units):
        raise ValueError(f"{len(costs)} costs for {len(units)} rows")
    # A plan is (-spread, first unit as tie-break, shares): its ranks with rows as (-cost, rows),
    # dearest first. Ranks still empty are left out, or merging would cost `ranks` each time.
    plans = []
    for number, rows in enumerate(_units_in_order(units)):
        cost = float(sum(costs[row] for row in rows))
        plans.append((-cost if ranks > 1 else 0.0, number, [(-cost, rows)]))
    heapq.heapify(plans)
    while len(plans) > 1:
        _, number, dear = heapq.heappop(plans)
        _, other, cheap = heapq.heappop(plans)
        alone = max(ranks - len(cheap), 0)  # the dearest of `dear` meet an empty rank
        merged = dear[:alone] + cheap[: max(ranks - len(dear), 0)]
        for (a_cost, a_rows), (b_cost, b_rows) in zip(dear[alone:], cheap[::-1], strict=False):
            merged.append((a_cost + b_cost, a_rows + b_rows))
        merged.sort()
        cheapest = merged[-1][0] if len(merged) == ranks else 0.0
        heapq.heappush(plans, (merged[0][0] - cheapest, min(number, other), merged))
    rank_of = [0] * len(costs)
    shares = plans[0][2] if plans else []
    for rank, rows in enumerate(sorted(sorted(rows) for _, rows in shares)):
        for row in rows:
            rank_of[row] = rank
    return rank_of


def minibatch_plan(units: Sequence[int], count: int, seed: int | None) -> list[int]:
    """Minibatch number of each row; rows of one unit share a minibatch.

    Minibatches differ by at most one unit. With fewer units than `count` there are as many
    minibatches as units, none of them empty; no rows give no minibatches. seed: None fills them in
    row order, an integer shuffles the units first.
    """
    if count < 1:
        raise ValueError(f"a batch needs at least 1 minibatch, got {count}")
    groups = _units_in_order(units)
    if seed is not None:
        random.Random(seed).shuffle(groups)
    number_of = [0] * len(units)
    filled = min(count, len(groups))
    for i, rows in enumerate(groups):
        for row in rows:
            number_of[row] = i * filled // len(groups)
    return number_of
