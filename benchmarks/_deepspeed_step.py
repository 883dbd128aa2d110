"""DeepSpeed's host optimizer step, for ``step.py``: run by an interpreter that has torch and deepspeed and nothing of ours.

``python _deepspeed_step.py PARAMS THREADS`` reads a line per request from standard input and answers with the seconds of
one step: bf16 gradients cast to fp32, ``DeepSpeedCPUAdam``, the weights cast back to bf16.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    # Libraries print to standard output; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params, threads = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    master = torch.nn.Parameter(torch.randn(params) * 0.02)
    weights, gradients = master.detach().bfloat16(), torch.randn(params).bfloat16()
    master.grad = torch.empty(params)
    optimizer = DeepSpeedCPUAdam([master], lr=3e-4, weight_decay=0.01)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        with torch.no_grad():
            master.grad.copy_(gradients)
            optimizer.step()
            weights.copy_(master)
        print(time.perf_counter() - began, file=answers, flush=True)


if __name__ == "__main__":
    main()
