"""Checks every name of SGLang that the plug-in uses, in every release that pyproject allows."""

from importlib.metadata import version
from pathlib import Path

import pytest
import sglang

from prefill_client.sglang.release import check_release
from testing.engine_environments import SGLANG_FOLDER
from testing.source_names import Names, missing_names, missing_texts, release_in, releases_of

QWEN = "multimodal/processors/qwen_vl.py"
BASE = "multimodal/processors/base_processor.py"
BATCH = "managers/schedule_batch.py"
UPDATER = "model_executor/model_runner_components/weight_updater.py"
NAMES: list[Names] = [
    (QWEN, "QwenVLImageProcessor", "", "models process_mm_data_async compose_image_artifacts"),
    (QWEN, "QwenVLImageProcessor", "process_mm_data_async", "image_data input_text request_obj args kwargs"),
    (QWEN, "QwenVLImageProcessor", "compose_image_artifacts", "input_text artifacts"),
    (
        QWEN, "QwenVLImagePreprocessArtifact", "",
        "content_digest artifact_key feature_hash feature model_specific_data",
    ),
    (BASE, "BaseMultimodalProcessor", "__init__", "hf_config server_args _processor"),
    (BATCH, "MultimodalDataItem", "", "modality feature offsets model_specific_data set_hash"),
    (BATCH, "", "", "Modality FINISH_ABORT"),
    (BATCH, "FINISH_ABORT", "__init__", "message status_code"),
    ("managers/io_struct.py", "AbortReq", "", "finished_reason"),
    ("managers/scheduler.py", "Scheduler", "run_batch", "batch"),
    ("managers/mm_schedule.py", "", "", "embedding_cache"),
    ("models/qwen2_5_vl.py", "Qwen2_5_VLForConditionalGeneration", "__init__", "config"),
    ("models/qwen2_5_vl.py", "Qwen2_5_VLForConditionalGeneration", "get_image_feature", "items"),
    ("models/qwen3_vl.py", "Qwen3VLForConditionalGeneration", "__init__", "config"),
    ("models/qwen3_vl.py", "Qwen3VLForConditionalGeneration", "get_image_feature", "items"),
    ("models/qwen3_vl.py", "Qwen3VLForConditionalGeneration", "", "visual"),
    ("models/qwen3_vl_moe.py", "", "", "Qwen3VLMoeForConditionalGeneration"),
    ("models/qwen3_5.py", "", "", "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration"),
    ("configs/model_config.py", "ModelConfig", "from_server_args", "server_args"),
    (UPDATER, "WeightUpdater", "update_weights_from_disk", "self"),
    (UPDATER, "WeightUpdater", "update_weights_from_tensor", "self"),
    (UPDATER, "WeightUpdater", "update_weights_from_ipc", "self"),
    (UPDATER, "WeightUpdater", "load_weights_from_distributed", "self"),
    (UPDATER, "WeightUpdater", "update_weights_from_tensor", "named_tensors load_format"),
    (UPDATER, "WeightUpdater", "begin_weight_update", "self"),
    (UPDATER, "WeightUpdater", "end_weight_update", "run_post_load"),
    ("utils/weight_checker.py", "WeightChecker", "", "_get_model _reset_tensors"),
    ("multimodal/processors/base_processor.py", "BaseMultimodalProcessor", "clear_preprocess_cache", "self"),
    ("mem_cache/multimodal_cache.py", "MultiModalStaticCache", "clear", "self"),
    ("runtime_context.py", "", "", "get_disagg get_mm get_model get_parallel remote_instance_transfer_engine_enabled"),
    ("environ.py", "Envs", "", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE SGLANG_EXTERNAL_MODEL_PACKAGE"),
    ("utils/common.py", "ImageData", "", "url"),
    ("utils/common.py", "smart_to_rgb", "", ""),
    ("arg_groups/fields/mm.py", "Mm", "", "allowed_media_domains mm_process_config"),
    ("arg_groups/fields/model.py", "Model", "", "model_path revision trust_remote_code load_format download_dir"),
    ("arg_groups/fields/disagg.py", "Disagg", "", "language_only"),
    ("arg_groups/fields/parallel.py", "Parallel", "", "pp_size"),
    ("distributed/parallel_state.py", "GroupCoordinator", "", "cpu_group ranks world_size"),
]  # fmt: skip
# Said by a file in other ways than a definition.
TEXTS = [
    # A model may return the rows of each image by itself.
    ("managers/mm_schedule.py", "if isinstance(all_miss_embedding, list):"),
    # How requests end whose images have no rows.
    ("managers/mm_schedule.py", "embedding_cache.free(cache_key, None)"),
    ("managers/mm_schedule.py", "embedding_cache.get_single(item.hash)"),
    # An updater knows its model.
    (UPDATER, "self.get_model().load_weights("),
    ("managers/scheduler.py", "self._pending_chunked_abort_req = chunked_req"),
    ("managers/scheduler.py", "self.ipc_channels.send_to_tokenizer.send_output("),
    ("managers/schedule_batch.py", "decoding_reqs: List[Req]"),
    ("mem_cache/common.py", "not req.skip_radix_cache_insert"),
    ("managers/multimodal_processor.py", "package = importlib.import_module(package_name)"),
    ("models/registry.py", "package = importlib.import_module(package_name)"),
    ("runtime_context.py", '"attn_tp_rank"'),
    ("runtime_context.py", '"attn_tp_group"'),
]


INSTALLED = Path(sglang.__file__).parents[1]
RELEASES = {
    folder.name: release_in(folder / "sglang/srt")
    for folder in (INSTALLED, SGLANG_FOLDER / "newest")
    if folder.exists()
} | releases_of(SGLANG_FOLDER / "wheels", "sglang/srt")


@pytest.mark.story("every name that we use, in every release")
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_every_name_that_we_use(release: str) -> None:
    assert not missing_names(RELEASES[release], NAMES)


@pytest.mark.story("every name that we use, in every release")
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_the_source_text_that_we_rely_on(release: str) -> None:
    assert not missing_texts(RELEASES[release], TEXTS)


def test_all_releases_in_pyproject_are_checked() -> None:
    if not SGLANG_FOLDER.exists():
        pytest.skip("make test-sglang installs them")
    assert {*RELEASES} >= {"site-packages", "newest", "sglang-0.5.22"}
    for release in (version("sglang"), "0.5.22", "0.5.23"):
        check_release(release)


@pytest.mark.parametrize("release", ["0.5.20", "0.5.24", "0.6.0", "1.0"])
def test_other_releases_are_refused_in_one_sentence(release: str) -> None:
    with pytest.raises(RuntimeError, match=rf"SGLang >=0\.5\.21,<0\.5\.24, but {release} is installed"):
        check_release(release)
