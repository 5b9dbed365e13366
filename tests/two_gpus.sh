#!/bin/bash
# What needs several GPUs, part by part: each with a time limit of its own, none stops the others.
# tests/two_gpus.sh PYTHON OUT [PART ...]: JSON lines in OUT/PART.json, what was said in OUT/PART.txt.
# Whoever is late is killed with all that it started.
python=$1
out=$2
shift 2
parts=${*:-"comm kernels mesh decode prefill overlap determinism"}
mkdir -p "$out"
export OMP_NUM_THREADS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 DEEPMESH_RESULTS="$out"
failed=0

part() { # NAME SECONDS COMMAND...: stdout is JSON
	local name=$1 seconds=$2 began=$SECONDS status
	shift 2
	case " $parts " in *" $name "*) ;; *) return ;; esac
	timeout --kill-after=5 "$seconds" "$@" >"$out/$name.json" 2>"$out/$name.txt"
	status=$?
	[ $status = 0 ] || failed=1
	echo "{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - began))}"
	tail -n 12 "$out/$name.txt" | cut -c1-400
}

tests() { # NAME SECONDS ARGUMENTS OF PYTEST...
	local name=$1 seconds=$2
	shift 2
	part "$name" "$seconds" sh -c "exec $python -m pytest -q -rs --durations=5 $* 1>&2"
}

part comm 120 "$python" -m bench.comm --device cuda --json --limit 110 \
	--tokens 1 --tokens 16 --tokens 128 --tokens 1024 --tokens 8192
tests kernels 100 --noconftest -m gpu tests/kernels/test_one_sided.py tests/kernels/test_one_sided_cuda.py \
	tests/services/test_window_cuda.py
tests mesh 150 --noconftest -rP -m gpu tests/e2e/test_device_ranks.py
part decode 150 "$python" -m bench.decode --device cuda --ranks 2 --zipf 0 --batch 64 --json --limit 140
part prefill 120 "$python" -m bench.prefill --device cuda --ranks 2 --zipf 0 --tokens 8192 --json --limit 110
part overlap 150 "$python" -m bench.overlap --device cuda --ranks 2 --rows 256 --chats 1200 200:800 --json
part determinism 150 "$python" -m deepmesh.cli check determinism --device cuda --only ranks --json
exit $failed
