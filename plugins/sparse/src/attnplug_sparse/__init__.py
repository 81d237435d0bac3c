"""attnplug-sparse: sparse and compressed attention layers.

- ``attention``: ``SparseAttention``, the base class of backends that serve sparse layers
- ``selection``: ``select_rows``, which the layers of a model call
- ``index``: ``SparseIndex``, the scores and top-k selection by Triton kernels
- ``pools``: caches of index keys and of compressed entries
- ``hisparse``: a coordinator that keeps latent rows in host memory
- ``torch_sparse``: the reference backend; see ``attnplug_sparse.plugin``
"""
