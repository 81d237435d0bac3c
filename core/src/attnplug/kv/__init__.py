"""KV cache: page layouts, buffers, pools of dense and linear layers, keyed caches, and scratch memory."""
