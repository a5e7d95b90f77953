"""Where processes that read and tokenize rows come from."""

import multiprocessing
from multiprocessing.context import BaseContext

PRELOADED = [
    "torch",
    "torchdata.stateful_dataloader",
    "transformers.models.auto.tokenization_auto",
    "fsdprl.data.sources",
]
"""Seconds of imports, which the server does once; it leaves out what is not installed."""


def data_processes() -> BaseContext:
    """A server that has imported and done nothing else; each process is forked from it.

    A fork of the rank itself would copy locks that its threads hold, and a fresh interpreter for each process would
    spend six seconds of a core on imports. Where there is no fork (Windows) processes are spawned.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
