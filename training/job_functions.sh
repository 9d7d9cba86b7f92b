# What the jobs for a GPU share. They set work, out, data, text and python.

# keep WHAT...: copy results that exist to OUT. Zip files hold a folder, images become JPEG.
keep() {
  "$python" - "$work" "$out" "$@" <<'PYTHON'
import pathlib, shutil, sys, zipfile
work, out = map(pathlib.Path, sys.argv[1:3])

def pack(name, root, files):
    unfinished = out / f".{name}"
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(root))
    unfinished.rename(out / name)

vae, kept = work / "flux" / "vae.pt", out / "vae.zip"
if vae.exists() and not (kept.exists() and kept.stat().st_mtime > vae.stat().st_mtime):
    pack("vae.zip", vae.parent, [vae])
for model in sys.argv[3:]:
    folder = work / model / "pipeline"
    if folder.exists():
        name = "lora.zip" if model == "4step" else f"{model}.zip"
        files = [file for file in folder.rglob("*") if file.is_file()]
        vae = [file for file in files if model == "wan" and file.parent.name == "vae"]  # together they are large
        pack(name, folder, [file for file in files if file not in vae])
        if vae:
            pack("wan_vae.zip", folder, vae)
    sheet = work / model / "samples.png"
    if sheet.exists():
        from PIL import Image
        Image.open(sheet).convert("RGB").save(out / f"{model}_samples.jpg", quality=85)
    moving = work / model / "samples.webp"
    if moving.exists():
        shutil.copy(moving, out / f"{model}_samples.webp")
logs = [*work.glob("*.log"), *work.glob("*/*.csv"), *work.glob("*/reconstructions.png")]
pack("logs.zip", work, logs)
PYTHON
}

# train MODEL MINUTES MORE...: all of its stages. Whatever fails, what exists is kept.
train() {
  local model=$1 minutes=$2 status
  shift 2
  echo "$(date +%T) $model: $minutes minutes, $*" >>"$work/job.log"
  "$python" -m training.run all --model "$model" --text "$text" --data "$data" --work "$work/$model" \
    --minutes "$minutes" "$@" >>"$work/$model.log" 2>&1 &
  local process=$!
  while kill -0 "$process" 2>/dev/null; do # results are kept while samples are still drawn
    sleep "${KEEP_SECONDS:-5}"
    keep "$model" 2>>"$work/job.log"
  done
  wait "$process"
  status=$?
  keep "$model" 2>>"$work/job.log"
  echo "$(date +%T) $model: ended with $status" >>"$work/job.log"
  return $status
}

# train_somehow MODEL MINUTES MORE...: from the fastest way to the plainest. One that fails leaves its last checkpoint to
# the next. Compiled code knows its attention's kernel, the cache does not: each has a cache of its own.
train_somehow() {
  local model=$1 minutes=$2
  shift 2
  TORCHINDUCTOR_CACHE_DIR="$work/compiled-flash" train "$model" "$minutes" --compile --attention flash "$@" ||
    TORCHINDUCTOR_CACHE_DIR="$work/compiled-efficient" train "$model" "$minutes" --compile --attention efficient "$@" ||
    train "$model" "$minutes" --attention efficient "$@"
}
