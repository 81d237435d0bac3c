#!/usr/bin/env bash
# The tables that ship for a GPU, and how `auto` does with them: on an H200, with every backend that runs there installed.
# bash benchmarks/auto_h200.sh tune nvidia-h200.json    measures all tables into one file; split_tables.py distributes it
# bash benchmarks/auto_h200.sh bench FOLDER            measures `auto` beside each backend, after tuning into the user's cache
set -euo pipefail
equal=1x512,1x2048,1x8192,1x32768,1x64k,2x2048,2x8192,3x2048,3x8192,4x512,4x2048,4x8192,4x32768,4x64k,8x512,8x2048,8x8192,8x32768
equal+=,16x512,16x2048,16x8192,16x32768,24x2048,24x8192,32x512,32x2048,32x8192,32x32768,48x2048,48x8192
equal+=,64x512,64x2048,64x8192,64x32768,96x2048,96x8192,128x512,128x2048,128x8192,256x512,256x2048,256x8192
ragged=2x~2048,2x~8192,3x~2048,3x~8192,4x~512,4x~2048,4x~8192,4x~32768,8x~512,8x~2048,8x~8192,8x~32768
ragged+=,16x~512,16x~2048,16x~8192,24x~2048,24x~8192,32x~512,32x~2048,32x~8192,48x~2048,48x~8192
ragged+=,64x~512,64x~2048,64x~8192,96x~2048,96x~8192,128x~512,128x~2048,128x~8192,256x~512,256x~2048
grid=1x1024,1x4096,1x16384,1x65536,4x4096,16x4096,64x4096,128x8192,256x2048
other=1x777,1x30000,3x~9000,8x~3000,12x~2000,24x~5000,40x~1500,96x~6000
mla=triton_mla,flashinfer_mla,flashmla fp8=triton_mla,flashinfer_mla gqa=flashattention,flashinfer,triton_mha
sparse=triton_mla,flashmla_sparse

tune() { attnplug tune --device cuda --max-context 65536 --budget 200 --points "$equal,$ragged" --tables "$file" "$@"; }
bench() { attnplug bench --device cuda --points "$grid,$other" "$@"; }

case ${1:-} in
tune)
  file=${2:?name a file}
  tune --shapes mla:16,mla:128,mla:32,mla:64,mla:8 --backends $mla
  tune --shapes mla:128,mla:16 --host vllm --backends $mla
  tune --shapes mla:128k2048,mla:64k2048 --backends $sparse
  tune --shapes mla:128k2048,mla:64k2048 --host vllm --backends $sparse
  tune --shapes mla:16,mla:128 --kv-dtype float8_e4m3 --backends $fp8
  tune --shapes gqa:32/8x128,gqa:64/8x128,gqa:48/8x128,gqa:28/4x128 --backends $gqa
  ;;
bench)
  to=${2:?name a folder}
  bench --shapes mla:16,mla:128,mla:8,mla:32,mla:64 --backends auto,$mla --against raw --out "$to/auto_mla_h200.json"
  bench --shapes mla:16,mla:64 --kv-dtype float8_e4m3 --backends auto,$fp8 --out "$to/auto_mla_fp8_h200.json"
  bench --shapes gqa:32/8x128,gqa:48/8x128,gqa:40/8x128 --backends auto,$gqa --against raw --out "$to/auto_gqa_h200.json"
  ;;
*) sed -n '2,4s/^# //p' "$0" && exit 2 ;;
esac
