"""Operations on the paged KV pool and the layers around it, dispatched by device.

`select_ops(device)` gives the back end; `KVLayout` makes the pool that it reads; `AttentionMetadata` describes a step.
"""
