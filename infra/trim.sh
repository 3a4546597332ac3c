#!/bin/sh
# Take out of an environment what no service uses: its packages' own tests, what is for compilers and
# debuggers, second copies of libraries, the parts of pyarrow that nothing here reads with, the hub
# that tokenizers could download from, and scipy, which JAX asks for but imports for sparse solvers
# and window functions only. CUDA's own packages stay as they are.
#   sh infra/trim.sh /opt/skerry
set -e
cd "$1"/lib/python3*/site-packages
rm -rf scipy scipy.libs huggingface_hub hf_xet blosc2/lib/libblosc2.* pyarrow/src
rm -rf pyarrow/*flight* pyarrow/*s3* pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.*.*
set -- . -path ./nvidia -prune -o -path './jax_*' -prune -o
find "$@" -type d \( -name test -o -name tests \) -prune -exec rm -rf {} +
find "$@" -type f \( -name '*.py[ix]' -o -name '*.px[di]' -o -name '*.h' -o -name '*.a' \) -exec rm {} +
# Into a new file: this one may be a link into a cache. Libraries in *.libs are patched: stripping may
# break them.
find "$@" -name '*.libs' -prune -o -type f -name '*.so*' -print | while read -r library; do
  strip --strip-unneeded -o "$library.new" "$library"
  mv "$library.new" "$library"
done
