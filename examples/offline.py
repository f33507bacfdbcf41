"""Batched inference in this process, without Redis. `python examples/offline.py [MODEL]`"""

import sys

from pagemill import LLM, SamplingParams

llm = LLM(
    model=sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m",
    block_size=16,
    gpu_memory_utilization=0.85,
)

sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)

prompts = [
    "Once upon a time in a galaxy far away,",
    "The three laws of robotics state that",
    "In the year 2145, the last library on Earth",
]

for output in llm.generate(prompts, sampling_params):
    print(f"PROMPT: {output.prompt}")
    print(f"GENERATED: {output.outputs[0].text.strip()}")
    print("-" * 60)
