"""Which rows go where: microbatches of packed tokens, even ranks, minibatches.

Plain arithmetic on lengths, made on the controller or on one rank from the same numbers. Every
function is deterministic: equal inputs give equal plans on every machine.
"""

import heapq
import random
from collections.abc import Sequence

SAME = 1e-9
"""Share of a cost that is rounding."""
STAY = 0.01
"""How much dearer the dearest rank may be for rows to stay where they are: less than trading them all costs."""


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


def balance(
    costs: Sequence[float], units: Sequence[int], ranks: int, at: Sequence[int] | None = None
) -> list[int]:
    """Rank of each row, such that rows of one unit share a rank and ranks cost about the same.

    The largest differencing method (Karmarkar and Karp 1982): the two most uneven partial plans
    are merged, dear shares onto cheap ones, until one plan is left. The dearest and the cheapest
    rank then differ by at most the dearest unit. Ranks are numbered by their first row.

    costs, units: one entry per row; costs are not negative. at: where the rows are now. If moving
    a few of them makes the dearest rank at most STAY dearer than that plan, the others stay.
    """
    if ranks < 1:
        raise ValueError(f"rows need at least 1 rank, got {ranks}")
    if len(costs) != len(units):
        raise ValueError(f"{len(costs)} costs for {len(units)} rows")
    groups = _units_in_order(units)
    plan = _differenced(costs, groups, ranks)
    if at is not None:
        moved = _refined(costs, groups, ranks, at)
        if max(_loads(costs, moved, ranks)) <= (1 + STAY) * max(_loads(costs, plan, ranks)):
            return moved
    return plan


def _differenced(costs: Sequence[float], groups: Sequence[list[int]], ranks: int) -> list[int]:
    """Rank of each row by the largest differencing method."""
    # A plan is (-spread, first unit as tie-break, shares): its ranks with rows as (-cost, rows),
    # dearest first. Ranks still empty are left out, or merging would cost `ranks` each time.
    plans = []
    for number, rows in enumerate(groups):
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


def _refined(
    costs: Sequence[float], groups: Sequence[list[int]], ranks: int, at: Sequence[int]
) -> list[int]:
    """Rank of each row: a unit where its first row is, and then one after the other from the dearest
    rank to the cheapest, the one that halves their difference best, as long as any lessens it."""
    here: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
    for number, rows in enumerate(groups):
        here[at[rows[0]]].append((float(sum(costs[row] for row in rows)), number))
    loads = [sum(cost for cost, _ in units) for units in here]
    for _ in range(
        ranks * len(groups)
    ):  # far more than there is to move; rounding must not add to it
        dear, cheap = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[dear] - loads[cheap]
        # One as dear as the gap only trades the two places; sums in another order make it look a little cheaper.
        fitting = [unit for unit in here[dear] if 0 < unit[0] < gap * (1 - SAME)]
        if not fitting:
            break
        unit = min(fitting, key=lambda unit: (abs(unit[0] - gap / 2), unit[1]))
        here[dear].remove(unit)
        here[cheap].append(unit)
        loads[dear] -= unit[0]
        loads[cheap] += unit[0]
    rank_of = [0] * len(costs)
    for rank, units in enumerate(here):
        for _, number in units:
            for row in groups[number]:
                rank_of[row] = rank
    return rank_of


def _loads(costs: Sequence[float], rank_of: Sequence[int], ranks: int) -> list[float]:
    loads = [0.0] * ranks
    for cost, rank in zip(costs, rank_of, strict=True):
        loads[rank] += cost
    return loads


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
