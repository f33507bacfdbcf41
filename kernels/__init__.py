"""Operations on the paged KV pool and the layers around it, dispatched by device."""
