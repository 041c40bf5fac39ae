"""The README's one table: question, key, and what the row says where its question is not at hand."""

SUMMARY = (
    ("tower", "ratio_720p", "one 1280×720 image through the tower: `transformers` / ours"),
    ("tower", "over_floor_720p", "the same: ours / its own products and attention"),
    ("serving", "overhead_ratio", "eight 256×256 images served / the bare tower"),
    ("serving", "submit_new_720p_ms", "grid and tokens of a new 1280×720 photo, p50"),
    ("hit", "hit_shm_ms", "hit of a 28.8 MB embedding (1280×720) over shared memory, p50"),
    ("hit", "hit_shm_four_1440p_ms", "hit of four 2560×1440 in one call, p50"),
    ("hit", "inline_gbps", "rows inline, over gRPC"),
    ("overlap", "serial_over_overlap", "time to first token: all images first / overlapped"),
    ("chat", "round_8_ratio", "ViT time in round 8 of a chat, all images again / ours"),
    (
        "scheduling",
        "mean_ttft_fcfs_over_ours",
        "mean time to first token at 80 % load: first come / ours (simulated)",
    ),
    ("fleet", "encodes_per_image", "encodes per distinct image, 3 replicas, half of the images shared"),
    ("fleet", "failed_images", "images failed when one of three replicas is killed under load"),
    ("hardened", "victim_p99_ratio", "p99 of a client beside the worst of ten attackers / with none"),
    ("hardened", "victim_failed", "requests of that client that failed"),
)
