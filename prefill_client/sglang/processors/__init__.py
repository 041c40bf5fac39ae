"""The package that SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE names."""

from prefill_client.sglang.release import check_release

check_release()

from prefill_client.sglang.processors import qwen  # noqa: E402, F401 - SGLang would only warn if it could not import it
