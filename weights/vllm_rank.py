"""A later rank of a vLLM on several nodes: `python -m weights.vllm_rank OPTION …`.

The options are those of `vllm serve --headless`, which is not used because it needs the metadata of
a distribution called vllm: builds under other names lack it.
"""

from __future__ import annotations

import gc


def main() -> None:
    gc.disable()  # to traverse again and again what the imports make takes a sixth of their CPU time
    from vllm.entrypoints.cli.serve import run_headless  # type: ignore[import-not-found]  # there in vLLM's environment only
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    gc.enable()
    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    options.api_server_count = 0
    run_headless(options)


if __name__ == "__main__":
    main()
