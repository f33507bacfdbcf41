"""The engine without a device: real scheduler and block code on a virtual clock, fed by recorded traffic.

`read_trace` -> `simulate` (the engine) or `simulate_baseline` (a twin without paging, or a naive one) -> `Result`.
Needs numpy, neither torch nor a model.
"""
