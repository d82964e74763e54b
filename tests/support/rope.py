"""Models whose RoPE frequencies depend on the longest position."""

from __future__ import annotations

from support.models import ALTERNATING, GQA, WINDOW, Family

SHORT = 40  # the positions that RoPE below was made for; one of the documents above is longer


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": SHORT,
}


ROPE = {
    "longrope": Family(
        "Phi3Config",
        {"hidden_size": 64, "original_max_position_embeddings": SHORT, "rope_parameters": LONGROPE},
    ),
    "dynamic": Family("LlamaConfig", {"max_position_embeddings": SHORT, "rope_parameters": DYNAMIC}),
    "dynamic in layers of one type": Family(
        "Gemma3TextConfig",
        ALTERNATING
        | {"max_position_embeddings": SHORT}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": DYNAMIC,
            }
        },
        {None: GQA, WINDOW: GQA},
    ),
}
