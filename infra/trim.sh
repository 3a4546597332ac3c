#!/bin/sh
# Take out of an environment what no service uses: its packages' own tests, what was left for
# debuggers in the two largest libraries, the parts of pyarrow that nothing here reads with, and
# scipy, which JAX asks for but imports for sparse solvers and window functions only.
#   sh infra/trim.sh /opt/skerry
set -e
find "$1" -type d \( -name test -o -name tests \) -prune -exec rm -rf {} +
for packages in "$1"/lib/python3*/site-packages; do
  for library in jaxlib/libjax_common.so llvmlite/binding/libllvmlite.so; do
    [ -e "$packages/$library" ] || continue
    # Into a new file: this one may be a link to that of a cache.
    strip --strip-unneeded -o "$packages/$library.new" "$packages/$library"
    mv "$packages/$library.new" "$packages/$library"
  done
  rm -rf "$packages"/pyarrow/include "$packages"/pyarrow/*flight* "$packages"/pyarrow/*s3*
  rm -rf "$packages"/scipy "$packages"/scipy.libs
done
