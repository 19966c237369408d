"""The names of the scheduling policies: what `scheduler.policy` in thaw.yaml, THAW_POLICY and `thaw simulate --policy` may say.

What they do is in services/scheduler/domain/policies; a test keeps both lists the same.
"""

from __future__ import annotations

DEFAULT_POLICY = "thaw"
POLICIES = (
    "thaw",
    "fifo",
    "hydraserve",
    "infless-ka",
    "keep-alive",
    "lru",
    "native",
    "serverless-random",
    "serverlessllm",
    "shepherd",
    "simple-swap",
    "swapservellm",
    "tangram",
    "torpor",
)
