"""The SGLang plugin: captures the hidden states of our own requests and leaves one dump per prompt in the spool.

SGLang finds `register` through the entry-point group `sglang.srt.plugins` and calls it in every process before
arguments are parsed. Nothing happens unless `EAGLE3_DATA_SPOOL` names the spool folder.

    hooks       which SGLang functions are hooked           states      where the batch's states are (native, by hooks)
    facts       what a loaded scheduler says of itself      layers      aux layers set, read back, or refused
    refusals    configurations that would spoil data        rows        which rows of a batch belong to which prompt
    copier      device -> host, never blocking              arena       host memory that two processes see
    capture     one scheduler's capture, all of it together writers     the scheduler's side of the process that writes
    messages    what the two tell each other                writing     that process
    pool        its threads                                 dumps       one dump file, written in row order
    info        what clients can ask                        routes      dumps over HTTP, for clients without the spool
"""

from __future__ import annotations

from eagle3_data.protocol import spool_from_env


def register() -> None:
    """Install capture into this process. Does nothing when `EAGLE3_DATA_SPOOL` is unset.

    Raises SystemExit with a message for an SGLang that cannot be captured from: SGLang logs and ignores every other
    exception of a plugin, and a server that starts without capture would waste the whole run.
    """
    spool = spool_from_env()
    if spool is None:
        return
    from eagle3_data.patches.sglang.hooks import install  # imports SGLang

    install(spool)
