"""What a model thinks of its answers once it has been told more: the solution, or a hint."""

from fsdprl.batch import Batch, Lease
from fsdprl.controller import current
from fsdprl.errors import UserError
from fsdprl.policy import Policy, Reference


def logprobs_told(
    model: Policy | Reference, batch: Batch, form: str, *, out: str = "logp_told"
) -> None:
    """Log-probability of every loss token behind a prompt that says more, into token column `out`.

    form: the prompt that the model is shown, with `{prompt}` for the last message of the user and `{answer}` for the
    row's reference answer. A policy is then its own teacher (OPSD, arXiv 2601.18734). Raises UserError
    for a form without {prompt}, and where it asks for an answer and a row has none.
    """
    if "{prompt}" not in form:
        raise UserError(
            f"the form {form!r} leaves the prompt out: write {{prompt}} where it belongs"
        )
    Lease.flush()
    lease, positions = Lease(batch.ranks), batch.by_rank()
    pairs = [(batch.row_ids[where], lease.row_ids[where]) for where in positions]
    asked = [{"rows": rows, "row_ids": new, "form": form} for rows, new in pairs]
    lengths = batch.gather(positions, current().call("rows.retell", asked, phase="adv").wait())
    columns = {"tokens": lengths} | {it: batch[it] for it in ("loss_tokens", "temperature")}
    model.logprobs(Batch.of(lease, columns), out=out)
    given = [{"rows": rows, "told": new, "column": out} for rows, new in pairs]
    current().call("rows.adopt", given, phase="adv").wait()
    batch.token_columns.add(out)
