"""The commands of the packages. Each is ready for signals before it imports anything slow.

The kernel ignores SIGTERM for process 1 of a container until there is a handler, and imports take a second.
"""

from importlib import import_module

from encoder_contract.command_line import begin


def encoder_service() -> int:
    return _run("encoder_service.cli")


def prefill_client() -> int:
    return _run("prefill_client.cli")


def prefill_reference() -> int:
    return _run("prefill_reference.cli")


def encoder_sglang_gateway() -> int:
    return _run("prefill_client.sglang_gateway.cli")


def _run(module: str) -> int:
    begin()
    code: int = import_module(module).main()
    return code
