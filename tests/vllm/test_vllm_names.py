"""Every name of vLLM that we use, in every release that pyproject.toml allows. A release that moves a name fails."""

import os
import re
from pathlib import Path

import pytest
import vllm

from prefill_client.vllm.middleware import FORMS, GENERATE, OTHER_ROUTES, RENDER_FORMS, WEIGHT_ROUTES
from testing.source_names import Names, missing_names, missing_texts, release_in, releases_of

WHEELS = Path(os.environ.get("VLLM_WHEELS", Path(__file__).resolve().parents[2] / ".venv-vllm/wheels"))
"""Releases that are read but not run; `make test-vllm` fetches them."""
CONNECTOR = "distributed/ec_transfer/ec_connector"

NAMES: list[Names] = [
    (f"{CONNECTOR}/base.py", "", "", "ECConnectorBase ECConnectorMetadata ECConnectorRole ECConnectorWorkerMetadata"),
    (f"{CONNECTOR}/base.py", "ECConnectorRole", "", "SCHEDULER WORKER"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "", "role is_producer shutdown _get_connector_metadata"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "__init__", "vllm_config role"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "ensure_cache_available", "request num_computed_tokens"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "has_cache_item", "identifier"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "update_state_after_alloc", "request index"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "update_state_after_free", "request index"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "request_finished", "request"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "take_unavailable_requests", ""),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "build_connector_meta", "scheduler_output"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "update_connector_output", "connector_output"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "get_ec_connector_stats", ""),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "start_load_caches", "encoder_cache kwargs"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "build_connector_worker_meta", ""),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "save_caches", "encoder_cache mm_hash kwargs"),
    (f"{CONNECTOR}/base.py", "ECConnectorBase", "build_ec_connector_stats", "data"),
    (
        f"{CONNECTOR}/base.py", "ECConnectorBase", "build_prom_metrics",
        "vllm_config metric_types labelnames per_engine_labelvalues"),
    (f"{CONNECTOR}/base.py", "ECConnectorWorkerMetadata", "aggregate", "other"),
    (f"{CONNECTOR}/metrics.py", "ECConnectorStats", "", "data reset is_empty aggregate reduce"),
    (f"{CONNECTOR}/metrics.py", "ECConnectorPromMetrics", "", "_counter_cls per_engine_labelvalues"),
    (
        f"{CONNECTOR}/metrics.py", "ECConnectorPromMetrics", "__init__",
        "vllm_config metric_types labelnames per_engine_labelvalues"),
    (f"{CONNECTOR}/metrics.py", "ECConnectorPromMetrics", "observe", "transfer_stats_data engine_idx"),
    ("distributed/ec_transfer/__init__.py", "", "", "get_ec_transfer has_ec_transfer"),
    ("v1/engine/core.py", "EngineCore", "collective_rpc", "method timeout args kwargs"),
    ("v1/engine/core.py", "EngineCore", "", "scheduler model_executor batch_queue"),
    ("v1/engine/core.py", "", "", "EngineCoreProc DPEngineCoreProc"),
    ("v1/engine/core.py", "EngineCoreProc", "", "input_queue"),
    ("v1/engine/core.py", "EngineCoreProc", "_process_input_queue", "self"),
    ("v1/engine/core.py", "EngineCoreProc", "_handle_client_request", "request_type request"),
    ("v1/engine/__init__.py", "EngineCoreRequestType", "", "WAKEUP"),
    ("v1/core/sched/scheduler.py", "Scheduler", "", "ec_connector get_num_unfinished_requests"),
    ("v1/core/sched/scheduler.py", "Scheduler", "", "encoder_cache_manager reset_encoder_cache"),
    ("v1/executor/multiproc_executor.py", "WorkerProc", "", "rpc_broadcast_mq"),
    ("v1/executor/multiproc_executor.py", "WorkerProc", "_execute_worker_rpc", "rpc_request"),
    ("distributed/device_communicators/shm_broadcast.py", "MessageQueue", "", "_spin_condition"),
    ("distributed/device_communicators/shm_broadcast.py", "SpinCondition", "", "last_read busy_loop_s"),
    ("v1/executor/abstract.py", "Executor", "", "sleeping_tags reset_encoder_cache"),
    ("v1/executor/abstract.py", "Executor", "collective_rpc", "method timeout args kwargs"),
    ("v1/worker/gpu_worker.py", "Worker", "execute_model", "scheduler_output"),
    ("v1/worker/gpu_worker.py", "Worker", "", "get_model reload_weights update_weights"),
    ("v1/worker/gpu_worker.py", "Worker", "", "start_weight_update finish_weight_update"),
    ("model_executor/model_loader/__init__.py", "", "", "get_model_cls"),
    ("config/weight_transfer.py", "WeightTransferConfig", "", "backend"),
    ("v1/core/encoder_cache_manager.py", "EncoderCacheManager", "create_manager", "cache_size vllm_config"),
    ("v1/core/encoder_cache_manager.py", "EncoderCacheManager", "__init__", "cache_size"),
    ("v1/core/encoder_cache_manager.py", "EncoderCacheManager", "can_allocate", "request input_id"),
    ("v1/core/encoder_cache_manager.py", "EncoderCacheManager", "", "cached"),
    ("v1/core/sched/output.py", "SchedulerOutput", "", "total_num_scheduled_tokens"),
    ("v1/core/sched/scheduler.py", "Scheduler", "_handle_blocked_waiting_request", "request"),
    ("v1/core/sched/scheduler.py", "Scheduler", "", "current_step running lora_config"),
    ("v1/outputs.py", "ECConnectorOutput", "", "ec_connector_worker_meta"),
    ("v1/request.py", "Request", "", "request_id num_prompt_tokens mm_features ec_transfer_params cache_salt"),
    (
        "entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest", "",
        "messages ec_transfer_params cache_salt priority mm_processor_kwargs media_io_kwargs",
    ),
    (
        "entrypoints/openai/responses/protocol.py", "ResponsesRequest", "",
        "input ec_transfer_params cache_salt priority mm_processor_kwargs media_io_kwargs",
    ),
    (
        "entrypoints/openai/responses/protocol.py", "ResponsesRequest", "",
        "previous_response_id request_id store background",
    ),
    (
        "entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest", "",
        "token_ids features content_parts cache_salt priority sampling_params kv_transfer_params ec_transfer_params",
    ),
    (
        "entrypoints/scale_out/token_in_token_out/protocol.py", "MultiModalFeatures", "",
        "mm_hashes mm_placeholders kwargs_data mm_metadata",
    ),
    ("entrypoints/scale_out/token_in_token_out/mm_serde.py", "", "encode_mm_kwargs_item", "item"),
    ("entrypoints/scale_out/render/serving.py", "ServingRender", "render_chat_request", "request"),
    ("entrypoints/scale_out/render/serving.py", "ServingRender", "render_messages_request", "request"),
    ("entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest", "", "messages"),
    ("config/multimodal.py", "MultiModalConfig", "", "enable_mm_embeds allow_missing_mm_embeddings"),
    ("multimodal/parse.py", "MultiModalDataParser", "", "allow_missing_mm_embeddings"),
    ("multimodal/processing/context.py", "BaseProcessingInfo", "", "data_parser"),
    ("multimodal/inputs.py", "MultiModalBatchedField", "", ""),
    ("multimodal/inputs.py", "MultiModalFieldElem", "", "data field"),
    ("multimodal/inputs.py", "MultiModalKwargsItem", "", ""),
    ("multimodal/inputs.py", "MultiModalFeatureSpec", "", "data modality identifier mm_position"),
    ("multimodal/inputs.py", "PlaceholderRange", "", "offset length get_num_embeds"),
    ("config/ec_transfer.py", "ECTransferConfig", "", "engine_id ec_connector_extra_config"),
    ("config/ec_transfer.py", "ECTransferConfig", "", "is_ec_producer is_ec_consumer"),
    ("config/ec_manager_config.py", "EncoderCacheManagerConfig", "", "encoder_cache_manager_cls"),
    ("config/multimodal.py", "MultiModalConfig", "", "mm_processor_kwargs media_io_kwargs mm_processor_cache_type"),
    ("config/multimodal.py", "MultiModalConfig", "", "mm_encoder_attn_dtype mm_encoder_fp8_scale_path"),
    ("config/multimodal.py", "MultiModalConfig", "", "video_pruning_rate"),
    ("config/multimodal.py", "MultiModalConfig", "get_limit_per_prompt", "modality"),
    ("config/load.py", "LoadConfig", "", "load_format download_dir ignore_patterns"),
    ("config/model.py", "ModelConfig", "", "model revision dtype quantization hf_config multimodal_config"),
    ("distributed/parallel_state.py", "", "", "get_tensor_model_parallel_rank"),
    ("config/scheduler.py", "SchedulerConfig", "", "max_num_batched_tokens"),
    ("config/parallel.py", "ParallelConfig", "", "nnodes pipeline_parallel_size"),
    ("config/parallel.py", "ParallelConfig", "", "distributed_executor_backend world_size"),
    ("config/lora.py", "LoRAConfig", "", "enable_tower_connector_lora default_mm_loras max_loras"),
    ("lora/request.py", "LoRARequest", "", "lora_int_id"),
    ("v1/request.py", "Request", "", "lora_request"),
    ("config/vllm.py", "VllmConfig", "", "ec_transfer_config kv_transfer_config"),
    ("config/speculative.py", "SpeculativeConfig", "", "num_speculative_tokens"),
    ("config/device.py", "DeviceConfig", "", "device"),
    ("multimodal/video.py", "Qwen3VLVideoBackend", "", "_MAX_FRAMES _MAX_FPS"),
    ("multimodal/video.py", "Qwen3VLVideoBackend", "compute_frames_index_to_sample", "source target"),
    ("transformers_utils/processor.py", "", "cached_image_processor_from_config", "model_config"),
    ("tokenizers/registry.py", "", "cached_tokenizer_from_config", "model_config"),
    ("model_executor/models/qwen3_vl.py", "Qwen3VLForConditionalGeneration", "__init__", "vllm_config prefix"),
    (
        "model_executor/models/qwen3_vl.py", "Qwen3VLForConditionalGeneration", "",
        "use_deepstack deepstack_num_level visual_dim multiscale_dim deepstack_input_embeds",
    ),
    ("model_executor/models/qwen3_vl_moe.py", "Qwen3VLMoeForConditionalGeneration", "__init__", "vllm_config prefix"),
    (
        "model_executor/models/qwen3_vl_moe.py", "Qwen3VLMoeForConditionalGeneration", "",
        "use_deepstack deepstack_num_level visual_dim multiscale_dim deepstack_input_embeds",
    ),
]  # fmt: skip
# Said by a file in other ways than a definition: flags of the command, what the middleware finds in the server's state.
TEXTS = [
    ("engine/arg_utils.py", '"--ec-transfer-config"'),
    ("engine/arg_utils.py", '"--ec-manager-config"'),
    ("engine/arg_utils.py", '"--limit-mm-per-prompt"'),
    ("engine/arg_utils.py", '"--mm-processor-kwargs"'),
    ("engine/arg_utils.py", '"--media-io-kwargs"'),
    ("engine/arg_utils.py", '"--default-mm-loras"'),
    ("engine/arg_utils.py", '"--enable-tower-connector-lora"'),
    ("engine/arg_utils.py", '"--allowed-media-domains"'),
    ("entrypoints/", "chat_template_content_format: "),
    ("entrypoints/", "trust_request_mm_kwargs: bool"),
    ("entrypoints/", "enable_prompt_tokens_details: bool"),
    ("entrypoints/", "multimodal_tokens=mm_token_counts"),
    # The marks around a video are kept in the prompt.
    ("model_executor/models/qwen3_vl.py", "_expands_only_video_token"),
    ("envs.py", "VLLM_API_KEY"),
    ("envs.py", "VLLM_ENABLE_RESPONSES_API_STORE"),
    # vLLM reads a part with a `uuid` by its keys and ignores its type. Named images in responses rely on it.
    ("", "if part_type is None or uuid is not None:"),
    ("", 'if "image_embeds" in part:'),
    ("entrypoints/", "state.vllm_config = vllm_config"),
    ("entrypoints/", "state.args = args"),
    ("entrypoints/launchers/render/", "state.online_renderer = OnlineRenderer("),
    ("entrypoints/scale_out/", "state.serving_render = ServingRender("),
    ("entrypoints/scale_out/render/", "await self.render_chat_request(chat_req"),
    ("entrypoints/", "state.engine_client = engine_client"),
    # Both pass every tensor of a trainer to `load_weights`.
    ("distributed/weight_transfer/nccl_engine.py", "post_unpack_func=self.model.load_weights"),
    ("distributed/weight_transfer/nccl_engine.py", "self.model.load_weights([(name, weight)])"),
    ("distributed/weight_transfer/ipc_engine.py", "self.model.load_weights("),
    ("entrypoints/", "middleware: list[str]"),
    # A worker learns what it is to do, and whether a step runs nothing, from the message that it gets.
    ("v1/executor/multiproc_executor.py", "method, args, kwargs, output_rank = rpc_request"),
    ("v1/executor/multiproc_executor.py", '"execute_model"'),
]


RELEASES = {"installed": release_in(Path(vllm.__file__).parent), **releases_of(WHEELS, "vllm")}


@pytest.mark.story("every name that we use, in every release")
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_every_name_that_we_use(release: str) -> None:
    assert not missing_names(RELEASES[release], NAMES)


@pytest.mark.story("every name that we use, in every release")
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_the_source_text_that_we_rely_on(release: str) -> None:
    assert not missing_texts(RELEASES[release], TEXTS)


WITHOUT_IMAGES = {
    "/abort_requests", "/detokenize", "/fault_tolerance/apply", "/init_weight_transfer_engine",
    "/inference/v1/abort_requests", "/is_scaling_elastic_ep", "/pause", "/ping", "/release_kv_cache_memory",
    "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume", "/scale_elastic_ep",
    "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update", "/start_profile", "/stop_profile",
    "/start_weight_update", "/update_weight_version", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/v1/chat/completions/derender", "/v1/completions", "/v1/completions/derender", "/v1/completions/render",
    "/v1/load_lora_adapter", "/v1/responses/{response_id}/cancel", "/v1/unload_lora_adapter", "/wake_up",
}  # fmt: skip
"""Routes of vLLM that take no images."""
TAKEN = FORMS.keys() | RENDER_FORMS.keys() | {GENERATE}
ROUTE = re.compile(r'\.(?:post|api_route|add_api_route)\(\s*"(/[^"]*)"')


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_no_route_that_we_do_not_know(release: str) -> None:
    files, read = RELEASES[release]
    sources = [name for name in files if name.startswith("entrypoints/")]
    routes = {route for name in sources for route in ROUTE.findall(read(name))}
    assert routes >= TAKEN
    assert routes - WITHOUT_IMAGES <= TAKEN | OTHER_ROUTES | WEIGHT_ROUTES


def test_all_releases_in_pyproject_are_checked() -> None:
    if not WHEELS.exists():
        pytest.skip("make test-vllm fetches the wheels")
    assert {name.rpartition("-")[2] for name in RELEASES} >= {"0.31.0", "0.33.0"}
