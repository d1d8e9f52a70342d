# On the GPU host, from the repository's root:  . benchmarks/gpu/setup.sh CARRIED
# Unpacks CARRIED/site.tar.xz once, installs this checkout beside it, joins CARRIED/model.* when all parts have come
# (earlier calls may have brought some: they are collected in $E3D_HOME), and puts the lot on PYTHONPATH.
E3D_HOME=${E3D_HOME:-${TMPDIR:-/tmp}/eagle3-gpu}
mkdir -p "$E3D_HOME/parts"
if [ ! -e "$E3D_HOME/site/.ready" ] && [ -e "$1/site.tar.xz" ]; then
    mkdir -p "$E3D_HOME/site"
    tar -xJf "$1/site.tar.xz" -C "$E3D_HOME/site" && touch "$E3D_HOME/site/.ready"
fi
for part in "$1"/model.*; do
    [ -e "$part" ] && cp "$part" "$E3D_HOME/parts/"
done
if [ -e "$E3D_HOME/parts/model.sum" ] && [ ! -e "$E3D_HOME/model/.ready" ]; then
    read -r count sum < "$E3D_HOME/parts/model.sum"
    here=$(ls "$E3D_HOME/parts" | grep -c '^model\.[0-9]*$')
    if [ "$here" = "$count" ]; then
        (cd "$E3D_HOME/parts" && for n in $(seq 0 $((count - 1))); do cat "model.$n"; done) > "$E3D_HOME/model.tar"
        [ "$(sha256sum < "$E3D_HOME/model.tar" | cut -d' ' -f1)" = "$sum" ] || { echo "the model's parts do not join"; exit 1; }
        mkdir -p "$E3D_HOME/model" && tar -xf "$E3D_HOME/model.tar" -C "$E3D_HOME/model" && touch "$E3D_HOME/model/.ready"
    else
        echo "model: $here of $count parts are here"
    fi
fi
# a folder per source, so that a later call does not pull the package from under what still runs
package="$E3D_HOME/package-$(find builders eagle3_data patches train pyproject.toml -type f | sort | xargs cat | sha256sum | cut -c1-12)"
[ -e "$package" ] || python3 -m pip install -q --no-deps --no-index --no-build-isolation --no-compile --target "$package" . || exit 1
export PYTHONPATH="$E3D_HOME/site:$package:$E3D_HOME/model" PYTHONUNBUFFERED=1
