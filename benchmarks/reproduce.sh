#!/usr/bin/env bash
# Measure the rows of benchmarks/results/ anew on this machine's GPU:
#
#   benchmarks/reproduce.sh FOLDER [presets] [skip] [methods] [bounds] [flux] [today] [video] [cache] [few-steps] [pipeline] [eager] [operators]
#
# Every part writes CSV files into FOLDER; without parts all are measured. Benchmarks of a part compile side by side and
# time one at a time (--take-turns). What is there already is not measured again. RATIOS=0.75 measures methods and bounds
# at that ratio alone, MODELS=flux2 that model of today, MODELS=wan that of video; COMMIT stands in for that of the
# checkout where there is none. It takes a GPU of some 100 GB; `make bench` times a little on any. Whatever fails is named
# at the end, and the exit status is then 1; interrupted, the benchmarks under way end too.
set -u
folder=${1:?"give a folder for the rows"}
shift
parts=${*:-presets skip methods bounds flux today video cache few-steps pipeline eager operators}
for part in $parts; do  # before hours are spent on the others
    case $part in
    presets | skip | methods | bounds | flux | today | video | cache | few-steps | pipeline | eager | operators) ;;
    *)
        echo "unknown part '$part': presets, skip, methods, bounds, flux, today, video, cache, few-steps, pipeline, eager or operators" >&2
        exit 2 ;;
    esac
done
mkdir -p "$folder" || exit 1
failed=
trap 'kill $(jobs -p) 2> /dev/null' EXIT
trap 'exit 130' INT TERM HUP
bench() {  # NAME ARGUMENTS…: one file of rows, in the background
    local name=$1
    shift
    names[${#names[@]}]=$name
    python3 -m toma_lab.cli bench ${COMMIT:+--commit "$COMMIT"} --take-turns "$folder/gpu.lock" \
        --output "$folder/$name.csv" "$@" > "$folder/$name.log" 2>&1 &
    jobs_of[${#jobs_of[@]}]=$!
}
finish() {  # all that are under way
    local index
    for index in "${!jobs_of[@]}"; do
        wait "${jobs_of[$index]}" || failed="$failed ${names[$index]}"
    done
    names=() jobs_of=()
}
names=() jobs_of=()

graph="--modes graph --steps 10 --repeats 5"
ratios=${RATIOS:-0.25,0.5,0.75}
for part in $parts; do
    started=$SECONDS
    case $part in
    presets)  # ours as they are, and `toma-stage` as it was; these rows are presets_h200.csv
        before='toma-stage:num_regions=64;distance_weight=0;guidance_parts=1;share_plan=True;skip_blocks=();select_every=10;reweigh_every=5'
        for method in toma-stage 'toma-stage:skip_blocks=()' "$before" toma-late toma-tile; do
            bench "presets-sdxl-$(printf %s "$method" | cksum | cut -d' ' -f1)" --model sdxl $graph --bounds none \
                --methods "$method" --ratios "$ratios"
        done
        bench presets-flux --model flux --modes compiled --steps 4 --repeats 3 --bounds none --methods toma-stage --ratios 0.5
        finish ;;
    skip)  # the presets that skip steps. A process for each: it compiles while others are timed
        for method in balanced fast faster; do
            for steps in 20 50; do
                bench "skip-sdxl-$steps-$method" --model sdxl --modes graph --steps $steps --repeats 5 --bounds none \
                    --methods $method --ratios 0.5
            done
        done
        finish
        for model in flux sd35; do
            for method in balanced fast faster; do
                bench "skip-$model-$method" --model $model --modes compiled --steps 20 --repeats 2 --bounds none \
                    --methods $method --ratios 0.5
            done
        done
        finish ;;
    methods)  # all of them on SDXL and on Stable Diffusion 1.5: 20 processes, some 100 GB on the GPU
        for model in sdxl sd15; do
            for method in toma toma:scale=1000 toma-stripe toma-tile toma-once toma-stage,todo toma-late tomesd tofu; do
                bench "methods-$model-${method//[:,=]/-}" --model $model $graph --bounds none --methods "$method" \
                    --ratios "$ratios"
            done
        done
        finish ;;
    bounds)  # what every preset is measured against, on SDXL
        for ratio in ${ratios//,/ }; do
            bench "bounds-toma-$ratio" --model sdxl $graph --methods toma --ratios $ratio
            bench "bounds-local-$ratio" --model sdxl $graph --methods toma-tile,toma-once,toma-stage --ratios $ratio \
                --bounds floor
        done
        finish ;;
    flux)
        for method in toma-stage toma; do
            bench "flux-$method" --model flux --modes compiled --steps 4 --repeats 3 --methods $method \
                --ratios 0.5,0.75
        done
        bench flux-2048 --model flux --modes compiled --steps 2 --repeats 3 --resolution 2048 --methods toma-stage \
            --ratios 0.5 --bounds none
        bench sd35 --model sd35 --modes compiled --steps 10 --repeats 3 --methods toma-stage,toma --ratios 0.5 --bounds none
        finish ;;
    today)  # models after Flux.1, with half of the tokens or more removed. One process at a time: FLUX.2 alone takes
        # 60 GiB. MODELS=krea2 measures that one alone, in some three minutes a
        # resolution, most of them compiling; interrupted, the same command goes on.
        for model in ${MODELS:-flux2 flux2-klein qwen-image z-image krea2}; do
            usual=1024
            [ "$model" = qwen-image ] && usual=1328
            for resolution in $usual 2048; do
                bench "today-$model-$resolution" --model "$model" --modes compiled --steps 4 --repeats 1 --bounds none \
                    --resolution $resolution --methods toma-stage --ratios 0.5,0.75
                finish
            done
        done ;;
    video)  # models of clips, as they are by default. One process at a time: MiniMax-H3 alone takes 62 GiB, and a step of
        # Wan is 6.5 PFLOP. MODELS=wan measures that one alone; interrupted, the same command goes on.
        for model in ${MODELS:-wan wan-480p wan-ti2v-5b ltx2 h3 hunyuan15}; do
            bench "video-$model" --model "$model" --modes compiled --steps 4 --repeats 1 --bounds floor \
                --methods 'toma-stage,toma-stage:region_frames=1' --ratios 0.5,0.75
            finish
        done ;;
    cache)  # the product with the first-block cache
        for threshold in 0.05 0.1 0.2; do
            bench "cache-$threshold" --model flux --modes compiled --steps 20 --repeats 2 --cache $threshold \
                --methods toma-stage --ratios 0.5 --bounds none
        done
        finish ;;
    few-steps)  # four steps, where a cache has nothing to skip
        bench few-steps --model sdxl --modes graph --steps 4 --repeats 5 --methods toma-stage,toma-tile --ratios 0.5 \
            --bounds none
        finish ;;
    pipeline)  # what a user gets from handle.compile("graphs"): a denoiser step, and a whole pipeline of twenty steps.
        # Takes long: the whole denoiser is compiled once for each kind of step, 3 to 4 minutes each.
        for method in toma-stage balanced; do
            bench "pipeline-$method" --pipeline --model sdxl --modes compiled --compile graphs --steps 20 --repeats 7 \
                --bounds none --methods $method --ratios 0.5
        done
        finish ;;
    eager)  # the same without a compiler: its kernels, replayed, so that the CPU does not decide
        for model in sdxl sd15; do
            bench "eager-$model" --model $model $graph --compile none --bounds none \
                --methods toma-stage,toma-once,toma-tile,toma,toma:scale=1000,toma-stripe,tomesd,tofu,todo
        done
        finish ;;
    operators)
        for operator in facility_location weights merge; do
            python3 benchmarks/bench_$operator.py ${COMMIT:+--commit "$COMMIT"} --output "$folder/ops.csv" \
                > "$folder/$operator.log" 2>&1 || failed="$failed $operator"
        done ;;
    esac
    echo "$part: $((SECONDS - started)) s"
done
grep -hE "^(Failed|Warning|Left out)" "$folder"/*.log
for name in $failed; do
    echo "$name failed, see $folder/$name.log: $(tail -n 1 "$folder/$name.log")" >&2
done
[ -z "$failed" ]
