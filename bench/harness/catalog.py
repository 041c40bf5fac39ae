"""The questions that `make bench` answers: which benchmark, how long it may take, and what its table shows."""

# Over 300 lines because it is one list, of questions and their figures.

import torch

from bench.harness.benchmark import Benchmark, Figure


def _no_cuda() -> str:
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def _tower_case(name: str, says: str) -> tuple[Figure, ...]:
    target = {"720p": ("<= 1.12", ">= 1.2"), "8x256": ("<= 1.15", ">= 1.2")}.get(name, ("", ""))
    return (
        Figure(f"cases.{name}.ours", f"{says}: ours", "ms", scale=1e3),
        Figure(f"ratio_{name}", f"{says}: `transformers` / ours", target=target[1]),
        Figure(f"over_floor_{name}", f"{says}: ours / its own products and attention", target=target[0]),
        Figure(f"over_luckiest_floor_{name}", f"{says}: the same, each call with its own best time"),
    )


TOWER = Benchmark(
    "tower",
    "How fast and how exact is the vision tower?",
    "vit",
    (
        Figure("product_tflops", "best matrix product of this machine", "TFLOP/s"),
        *_tower_case("256", "one 256×256"),
        *_tower_case("8x256", "eight 256×256"),
        *_tower_case("560", "one 560×560"),
        *_tower_case("720p", "one 1280×720"),
        *_tower_case("960x1280", "one 960×1280"),
        Figure("in_step_ratio", "eight 256×256: one by one / in step"),
        Figure("patch_embed_ratio", "patch embedding: Conv3d / ours", target=">= 20"),
        Figure("error_ratio_qwen3_vl", "Qwen3-VL: mean bf16 error, ours / `transformers`", target="<= 1"),
        Figure("error_ratio_qwen2_5_vl", "Qwen2.5-VL: the same", target="<= 1"),
        Figure("error_ratio_qwen3_5", "Qwen3.5: the same", target="<= 1"),
        *(
            Figure(f"float32_error_{kind}", f"{name}: largest float32 row error", "millionths", "<= 10", 1e6)
            for kind, name in (("qwen3_vl", "Qwen3-VL"), ("qwen2_5_vl", "Qwen2.5-VL"), ("qwen3_5", "Qwen3.5"))
        ),
    ),
    limit_s=540,  # its own budget, and what was under way when that was used up
    arguments=("--rounds", "3"),
    quick=("--rounds", "1", "--cases", "256"),
)
SERVING = Benchmark(
    "serving",
    "What does the service add to the bare engine?",
    "serving",
    (
        Figure("overhead_ratio", "eight 256×256 served / the bare tower, 27 blocks", target="<= 1.05"),
        Figure("busy_fraction", "device busy while images wait", target=">= 0.95"),
        Figure("submit_new_720p_ms", "Submit answer for a new 1280×720 photo, p50", "ms", "<= 5"),
        Figure("submit_known_720p_ms", "Submit answer for a known one, p50", "ms"),
        Figure("fetch_hit_ms", "Fetch of a held small image, p50", "ms"),
        Figure("loop_lag_p99_ms", "event loop late under full load, p99 (bucket's edge)", "ms", "<= 10"),
        Figure("images_per_s", "256×256 images under full load, 27 blocks", "per s"),
        Figure(
            "overload_p99_over_calm", "ten times overload: p99 of the admitted / at 80 % load", target="<= 2"
        ),
        Figure("overload_refused", "ten times overload: refused with a retry hint", "images"),
        Figure("overload_other", "ten times overload: any other failure", "images", "<= 0"),
        Figure("overload_memory_growth_mib", "ten times overload: growth of memory", "MiB"),
    ),
    limit_s=540,  # two checkpoints and four servers take minutes on a slow machine
    arguments=("--overload-s", "30", "--images", "64", "--rounds", "5"),
    quick=("--overload-s", "0", "--images", "16", "--rounds", "2"),
)
HIT = Benchmark(
    "hit",
    "What does a hit cost, by tier and transport?",
    "store",
    (
        Figure("pin_us", "lookup, pin and release at 100 000 entries, p50", "µs", "<= 20"),
        Figure("hit_shm_ms", "28.8 MB embedding of a 1280×720 over shared memory, p50", "ms", "<= 2"),
        Figure(
            "hit_shm_four_1440p_ms", "four 2560×1440 over shared memory, p50", "ms", "<= 6",
            compare="SGLang's encoder server: 382 (RDMA), 466 (zmq) (PR 28441)",
        ),
        Figure("inline_gbps", "28.8 MB embedding inline", "GB/s", ">= 0.9"),
        Figure("bare_gbps", "a bare gRPC stream of as many bytes", "GB/s"),
        Figure("inline_over_bare", "inline / bare stream", target=">= 0.8"),
        Figure("memcpy_gbps", "memcpy of as many bytes", "GB/s"),
        Figure("read_gbps", "read out of the shared segment", "GB/s"),
        Figure("put_gbps", "put into the store", "GB/s"),
        Figure("usable_percent", "arena in use after a day of random sizes, least", "%", ">= 90"),
        Figure("one_run_percent", "embeddings that can be viewed in one piece", "%"),
        Figure("entry_bytes", "memory of an entry beside its rows", "bytes"),
        Figure("handle_bytes", "a handle, on the wire", "bytes"),
        Figure("map_ms", "map a segment, once for each server", "ms"),
        Figure("view_us", "view the rows of a handle", "µs"),
        Figure("checksum_gbps", "XXH3-64 of rows", "GB/s"),
        Figure("frame_gbps", "inline rows framed by hand", "GB/s"),
        Figure("frame_generated_gbps", "framed by the generated class", "GB/s"),
        Figure("parse_gbps", "inline rows parsed by hand", "GB/s"),
        Figure("parse_generated_gbps", "parsed by the generated class", "GB/s"),
    ),
    limit_s=180,
    quick=("--no-server", "--entries", "5000", "--rounds", "5", "--images", "3000"),
)  # fmt: skip
OVERLAP = Benchmark(
    "overlap",
    "What does overlap inside one request give?",
    "overlap",
    (
        Figure("encode_ms", "encode of 16 images, alone", "ms"),
        Figure("prefill_ms", "prefill of their prompt, alone", "ms"),
        Figure("ttft_ms", "time to first token, overlapped", "ms"),
        Figure("serial_ms", "time to first token, all images first", "ms"),
        Figure("ttft_over_ideal", "overlapped / ideal", target="<= 1.1"),
        Figure("serial_over_overlap", "all images first / overlapped", target=">= 1.6"),
        Figure("parts_over_overlap", "encode and prefill alone, added up / overlapped"),
        Figure("quiet_rounds", "rounds in which nobody else used the machine"),
        Figure("rounds", "of so many"),
    ),
    limit_s=240,
    quick=("--rounds", "1"),
)
DESIGNS = Benchmark(
    "designs",
    "How do three designs compare on the same tower?",
    "designs",
    (
        Figure("whole_set_ttft_ms", "whole set first, one device, in process", "ms"),
        Figure("chunk_aware_ttft_ms", "chunk by chunk, one device, in process", "ms"),
        Figure("ours_ttft_ms", "ours: an encoder beside the language model", "ms"),
        Figure("whole_set_over_ours", "whole set first / ours"),
        Figure("chunk_aware_over_ours", "chunk by chunk / ours"),
    ),
    limit_s=300,
    quick=("--rounds", "1", "--images", "4"),
)
CHAT = Benchmark(
    "chat",
    "What does per-image caching give in a chat of eight rounds, one new image each?",
    "chat",
    (
        Figure("whole_set_vit_ms", "ViT in round 8, all images encoded again", "ms"),
        Figure("ours_vit_ms", "ViT in round 8, ours", "ms"),
        Figure(
            "round_8_ratio", "all again / ours", target=">= 5",
            compare="SGLang, one H200: 90 → 17 ms at 720p, 282 → 39 at 1080p, 698 → 88 at 2560×1440 (PR 22038)",
        ),
        Figure("whole_set_encodes", "images encoded in eight rounds, all again"),
        Figure("ours_encodes", "images encoded in eight rounds, ours", target="<= 8"),
    ),
    limit_s=540,
    quick=("--side", "128"),
)  # fmt: skip
MEMORY = Benchmark(
    "memory",
    "How many images until memory runs out?",
    "memory",
    (
        Figure("images", "2560×1440 images in one prompt, all with their rows"),
        Figure("delivered", "of which delivered"),
        Figure("memory_mib", "server memory at its highest", "MiB"),
        Figure("growth_mib_per_image", "server memory per image more, second half of the prompt", "MiB"),
        Figure(
            "transformers_mib_per_image", "`transformers`, whole set in one forward, per image more", "MiB",
            compare="out of memory at 20 → 51 images of 2560×1440 on one H200 (PR 22038)",
        ),
        Figure("embeddings_over_store", "bytes of all embeddings / bytes of the store"),
        Figure("encodes_per_image", "encodes per image"),
    ),
    limit_s=480,
    quick=("--images", "6", "--width", "640", "--height", "360"),
)  # fmt: skip
HASHING = Benchmark(
    "hashing",
    "What does hashing files at the client save?",
    "hashing",
    (
        Figure("hash_and_header_ms", "name and grid of a 1280×720 JPEG from its bytes", "ms"),
        Figure("pixels_key_ms", "the same image's key from its preprocessed pixels", "ms"),
        Figure("saving", "pixels' key / name from the file"),
        Figure("hash_gbps", "BLAKE3 of files, one thread", "GB/s"),
        Figure("known_upload_bytes", "bytes uploaded for an image that anyone sent before", "bytes", "<= 0"),
        Figure("loop_stall_inline_ms", "event loop stalled by 32 photos hashed on it", "ms"),
        Figure(
            "loop_stall_worker_ms", "the same, hashed in a worker (what the client does)", "ms",
            compare="hashing off the scheduler: 5.80 → 6.72 requests/s in SGLang (PR 14354)",
        ),
    ),
    limit_s=60,
    quick=("--rounds", "3"),
)  # fmt: skip
SCHEDULING = Benchmark(
    "scheduling",
    "What does the order of work give?",
    "scheduler",
    (
        Figure(
            "mean_ttft_fcfs_over_ours",
            "mean time to first token, first come / ours (simulated)",
            target=">= 2",
        ),
        Figure("p99_ttft_ours_over_fcfs", "p99, ours / first come", target="<= 1.1"),
        Figure("big_p99_ours_over_fcfs", "p99 of requests with 16 images or more, ours / first come"),
        Figure("throughput_ours_over_fcfs", "throughput, ours / first come"),
        Figure("overload_p99_over_80", "p99 at ten times overload / at 80 % load", target="<= 2"),
        Figure("next_batch_p99_us", "forming a batch with 10 000 images queued, p99", "µs"),
    ),
    limit_s=240,
    quick=("--cost-only",),
)
FLEET = Benchmark(
    "fleet",
    "How does it scale over replicas, and what do faults cost?",
    "fleet",
    (
        Figure(
            "encodes_per_image",
            "encodes per distinct image, 3 replicas, half of the images shared",
            target="<= 1",
        ),
        Figure("index_ms_32", "index cost of a Submit of 32 images, p50", "ms", "<= 2"),
        Figure("index_ms_32_cluster", "the same on a Redis Cluster of three", "ms"),
        Figure("index_acquire_ms", "acquire of 32 addresses: all of it that a Submit waits for, p50", "ms"),
        Figure("index_publish_ms", "publish of 32 addresses, after encoding, p50", "ms"),
        Figure("index_locate_ms", "locate of 32 addresses, p50", "ms"),
        Figure("index_hint_ms", "from publish to waiters on another replica knowing, p50", "ms"),
        Figure("index_redis_acquire_us", "time of Redis's one thread: acquire, each address", "µs"),
        Figure("index_redis_publish_us", "publish, each address", "µs"),
        Figure("index_redis_beat_us_100", "heartbeat of one replica among 100", "µs"),
        Figure(
            "index_location_bytes", "memory of Redis at 100 000 entries: a location, one replica", "bytes"
        ),
        Figure("index_lease_bytes", "a lease", "bytes"),
        Figure("index_source_overhead_bytes", "an image file of 300 kB, beside its bytes", "bytes"),
        Figure(
            "paper_redis_busy", "on paper, 100 replicas × 84.7 images/s: Redis's one thread", "%", scale=100
        ),
        Figure("paper_locations_gb", "the same: ten million locations", "GB"),
        Figure("paper_sources_gb", "the same: files of 300 kB, each kept for `--source-ttl-s`, 600 s", "GB"),
        Figure("throughput_3_over_1", "throughput of 3 replicas / one (simulated)", target=">= 2.7"),
        Figure("throughput_10_over_1", "of 10 replicas"),
        Figure("throughput_30_over_1", "of 30 replicas"),
        Figure("failed_images", "one of three killed under load: failed images", target="<= 0"),
        Figure("kill_worst_s", "one of three killed: longest wait above the p50 before", "s"),
        Figure("kill_latency_s", "one of three killed: higher latency for", "s", "<= 3"),
    ),
    limit_s=240,
    quick=("--index-only", "--rounds", "20", "--entries", "2000"),
)
PUBLISHED = Benchmark(
    "published",
    "What would overlap give on one H200, with stage times that others published?",
    "published",
    tuple(
        Figure(f"{design}_over_ours_{size}_chunk_2048", f"32 images of {size}: {says} / ours (simulated)")
        for size in ("720p", "1080p", "1440p")
        for design, says in (
            ("whole_set", "whole set first, one GPU"),
            ("no_overlap", "encoder GPU, no overlap"),
        )
    ),
    limit_s=60,
)
RANKS = Benchmark(
    "ranks",
    "What do handles save a tensor-parallel engine?",
    "tensor_parallel",
    (
        Figure("handle_bytes", "broadcast to each rank as handles", "bytes"),
        Figure("row_bytes", "broadcast to each rank as rows", "bytes"),
        Figure("handle_ms", "until every rank has its rows, by handles", "ms"),
        Figure("row_ms", "until every rank has its rows, by broadcast rows", "ms"),
        Figure(
            "rows_over_handles", "rows / handles",
            compare="3716 → 8 ms for 32 images of 720p once only metadata travelled (SGLang PR 21462)",
        ),
    ),
    limit_s=120,
    quick=("--rounds", "1"),
)  # fmt: skip
SIZING = Benchmark(
    "sizing",
    "What does an image cost, by arithmetic?",
    "sizing",
    tuple(
        figure
        for size in ("256", "560", "720p", "1080p", "1440p")
        for figure in (
            Figure(f"{size}.tflop", f"{size}: work of the tower", "TFLOP"),
            Figure(f"{size}.embedding_mb", f"{size}: embedding", "MB"),
        )
    ),
    limit_s=60,
)
HARDENED = Benchmark(
    "hardened",
    "What does a well-behaved client feel while others attack?",
    "hardened",
    (
        Figure("victim_p99_ratio", "p99 of a request beside the worst attacker / with none", target="<= 2"),
        Figure("victim_failed", "requests failed beside all attackers", target="<= 0"),
        Figure("calm_p99_ms", "p99 of a request with none", "ms"),
        *(
            figure
            for name, says in (
                ("headers", "files with headers that are long to read"),
                ("uploads", "uploads that never end"),
                ("readers", "Fetches that are never read"),
                ("decoders", "images of endless scans, or of many pixels in few bytes"),
                ("messages", "kilobytes that unpack into millions of messages"),
                ("unknown", "Fetches of images that nobody has"),
                ("partial", "messages that are begun and not ended"),
                ("claims", "many Fetches of few images"),
                ("dripping", "HTTP connections that drip"),
                ("watchers", "watchers of health that take no answer; and the server is told to stop"),
            )
            for figure in (
                Figure(f"p99_ratio_{name}", f"{says}: p99 / with none"),
                Figure(f"failed_{name}", f"{says}: failed", "requests"),
            )
        ),
    ),
    limit_s=240,
    quick=("--attacks", "messages"),
)
GPU = Benchmark("gpu", "How fast is the tower on a GPU?", "gpu", (), limit_s=600, why_not=_no_cuda)

# In the order of what a release must know: when the time runs out, the last ones are left.
QUESTIONS = (
    *(SIZING, PUBLISHED, HIT, HASHING, OVERLAP, CHAT, FLEET, SERVING, HARDENED, TOWER),
    *(RANKS, DESIGNS, MEMORY, SCHEDULING, GPU),
)
