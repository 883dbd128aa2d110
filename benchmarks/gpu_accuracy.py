"""The predicted peak beside ``torch.cuda.max_memory_allocated``: one GPU, 1.3 billion parameters, sequences of 2,048 tokens.

    python benchmarks/gpu_accuracy.py                      # with and without checkpointing; 40 GB of device memory

Prediction and cases are those of ``accuracy.py``. The allocator's peak in the second step is compared; what the driver and
libraries take beside torch's allocator is in neither.
"""

from __future__ import annotations

import torch

import onecopy
from accuracy import MODELS, Case, predict

MB = 1e6


def measure(case: Case) -> int:
    """The most bytes that torch's allocator has given out at a time in the second step."""
    torch.manual_seed(0)
    config, batch = MODELS[case.model]
    with torch.device("cuda"):
        model = case.build()
    engine = onecopy.initialize(model, case.plan, optimizer=lambda params: torch.optim.AdamW(params, fused=True))
    x = torch.randint(0, config.vocab, (batch, config.context), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine(x, x).backward()
        engine.step()
    found = torch.cuda.max_memory_allocated()
    engine.close()
    return found


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| model | stage | dtype | accumulation | recompute | predicted MB | measured | error |\n|" + " --- |" * 8)
    for stage in (0, 2, 3):
        for recompute in (False, True):
            case = Case("1.3b", 1, stage, "bf16", recompute=recompute)
            said, found = predict(case, "h200")["process"], measure(case)
            torch.cuda.empty_cache()
            numbers = (f"{said / MB:,.0f}", f"{found / MB:,.0f}", f"{said / found - 1:+.1%}")
            cells = (case.model, stage, case.dtype, 1, "on" if recompute else "off", *numbers)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
