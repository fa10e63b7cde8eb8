#!/usr/bin/env bash
# The reference study: the commands behind results/reference, one folder each.
#
#     results/reference.sh [FOLDER] [NAME...]     # FOLDER: results/again; NAME: all of them
#
# What FOLDER holds is not computed again. Every row is compared with the committed one at the end. Dialogues
# and questions with documents are read from DATA (default: data), where these files must lie, in the
# schemas of the hub's OpenAssistant/oasst1, rajpurkar/squad_v2 and hotpotqa/hotpot_qa.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/again}
shift || true
names=${*:-needle-1024 needle-1024-paper needle-1024-seen prose-1024 needle-4096-chunked boolq boolq-controlled oasst oasst-controlled ruler-1024-paper}
data=${DATA:-data}
# Those of the study: "all" would grow with every policy that is added.
policies=judgeq,keydiff,knorm,kvp,lagkv,oracle,random,snapkv,streaming_llm,tova
learned="--policy $policies,kvp:weights=dialogue"
dialogues="--task ppl/oasst --budgets 32,64,128,256 --data $data/oasst1_validation_en.jsonl"
questions="--task boolq --budgets 20,50,100,200"
needle="--task needle --budgets 64,128,256,512,1024 --limit 24"
prose="--task ruler/niah_single_2:haystack=python,ruler/niah_multikey_1:haystack=python --budgets 64,128,256,512 --limit 24"
long="--policy $policies --task needle:length=4096 --budgets 128,512 --limit 6 --protocol controlled"
ruler=ruler/qa_1:file=$data/squad_v2_dev_half_raw.json,ruler/qa_2:file=$data/hotpot_dev_distractor_raw.json
for name in fwe cwe vt niah_multi{query,value,key_3,key_2,key_1} niah_single_{3,2,1}; do ruler=ruler/$name,$ruler; done

run() {
    kvbench run --out "$out/$name" "$@"
}

for name in $names; do
    shown="" # all metrics; fewer where the figures would fill the repository
    case $name in
    needle-1024) run $learned $needle --pins 4,16 ;;
    needle-1024-paper) shown=string_match,kl; run $learned $needle ;;
    needle-1024-seen) shown=string_match,kl; run $learned $needle --pins 4,16 --question seen ;;
    prose-1024) shown=string_match,kl; run $learned $prose --pins 4,16 --question withheld ;;
    needle-4096-chunked)
        shown=string_match,kl
        run $long --schedule prefill
        run $long --schedule chunked --chunk 256
        ;;
    boolq) run $learned $questions --limit 300 ;;
    boolq-controlled) shown=accuracy,kl; run $learned $questions --limit 100 --protocol controlled ;;
    oasst) run $learned $dialogues --limit 45 ;;
    oasst-controlled) shown=ppl,kl; run $learned $dialogues --limit 24 --protocol controlled ;;
    ruler-1024-paper)
        shown=string_match
        run $learned --task "$ruler" --budgets 32,64,128,256,512 --limit 10
        ;;
    *) echo "no run '$name': choose from needle-1024{,-paper,-seen} prose-1024 needle-4096-chunked {boolq,oasst}{,-controlled} ruler-1024-paper" >&2; exit 2 ;;
    esac
    kvbench plot "$out/$name" ${shown:+--metric $shown}
    [ "$name" != needle-4096-chunked ] || kvbench plot "$out/$name" --versus schedule --metric $shown
    committed=results/reference/$name
    if [ -d "$committed" ] && ! [ "$committed" -ef "$out/$name" ]; then
        kvbench rerun "$committed" --out "$out/$name"
    fi
done
