"""How vLLM and SGLang start on a CPU, without our client or with it: needs neither of them."""

import json
from pathlib import Path
from typing import Any

from prefill_client.sglang.sglang_settings import MODELS, PROCESSORS, VARIABLE

CHUNK_TOKENS = 96
CONNECTOR = {
    "ec_connector": "EncoderServiceConnector",
    "ec_connector_module_path": "prefill_client.vllm.connector",
    "ec_role": "ec_consumer",
}
MANAGER = {"encoder_cache_manager_cls": "prefill_client.vllm.cache_manager.EncoderServiceCacheManager"}
SGLANG_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first image waits almost a minute for a compilation
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SGLANG_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--random-seed", "0"),
    "--enable-metrics",
    *("--attention-backend", "torch_native", "--mm-attention-backend", "sdpa"),
    *("--disable-cuda-graph", "--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--max-running-requests", "8"),
]
VIDEO = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}


def transfer(folder: Path, role: str) -> dict[str, Any]:
    """Return the `ec_transfer_config` of a producer or a consumer of rows in a folder.

    `ECExampleConnector` is the connector of vLLM that starts on a CPU. `ECCPUConnector` needs the V2 model runner, and
    `ECMooncakeConnector` needs RDMA.
    """
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def package_variables(endpoint: str, **settings: object) -> dict[str, str]:
    """Return the environment of an engine that loads our packages and encodes images with the service."""
    return {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSORS,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": MODELS,
        VARIABLE: json.dumps({"endpoints": endpoint, **settings}),
    }


def add_video_processor(folder: Path, family: str) -> Path:
    """Add the video settings, which SGLang reads at start, to a checkpoint; return its folder."""
    images = json.loads((folder / "preprocessor_config.json").read_text())
    videos = {**images, "video_processor_type": VIDEO[family]}
    del videos["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder
