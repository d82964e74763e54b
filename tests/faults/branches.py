"""Faults of documents that share their first rows."""

from faults.fault import Fault

EXACT = "tests/runtime/test_branches.py"
LAYOUT = "tests/plan/test_branch_layouts.py"
PLAN = "tests/plan/test_plan.py"
CONSISTENT = "tests/plan/test_consistency.py"
MODELS = "tests/integrations/test_hf_branches.py"
ARRANGEMENT = "cpp/plan/arrangement.cpp"
LAYOUTS = "cpp/plan/layout.cpp"
REDUCED = "tests/plan/test_reduce_dtype.py"
STRESS = "tests/attention/test_several_scores.py"
KERNELS = "tests/cuda/test_kernels_on_host.py"
FLASH = "tests/cuda/test_flash_ranks.py"
SLICES = "cpp/plan/slice_tables.cpp"

FAULTS = [
    Fault(
        "branches: a branch has all rows of what it branches off",
        LAYOUTS,
        "const int64_t end = i == 0 ? document_lengths_[static_cast<size_t>(d)] : first_row(path[i - 1]);",
        "const int64_t end = document_lengths_[static_cast<size_t>(d)];",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: a document may branch off one that has not the row before its own first one",
        LAYOUTS,
        "require(first_row(b.parent) < first && first <= document_lengths_[static_cast<size_t>(b.parent)],",
        "require(first_row(b.parent) < first,",
        (LAYOUT,),
    ),
    Fault(
        "branches: documents of a joined layout branch off the first part's",
        LAYOUTS,
        "branches.push_back({num_documents + b.document, num_documents + b.parent});",
        "branches.push_back({num_documents + b.document, b.parent});",
        (LAYOUT,),
    ),
    Fault(
        "branches: a range may begin in shared rows",
        LAYOUTS,
        "require(first <= rows.begin && rows.begin < rows.end && rows.end <= length,",
        "require(0 <= rows.begin && rows.begin < rows.end && rows.end <= length,",
        (LAYOUT,),
    ),
    Fault(
        "branches: they are not in the digest of a layout",
        "cpp/plan/plan.cpp",
        "if (layout.has_branches()) d.add(words_of(layout.branches()));",
        "",
        (LAYOUT,),
    ),
    Fault(
        "branches: heads are cut document by document",
        "cpp/plan/task_list.cpp",
        "int32_t& index = cuts_of[static_cast<size_t>(layout.tree(t.document))];",
        "int32_t& index = cuts_of[static_cast<size_t>(t.document)];",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: key gradients come in the order of the documents' numbers",
        ARRANGEMENT,
        "if (layout_.has_branches())  // rows that a document shares may be of documents with higher numbers",
        "if (false)",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: the second group of a server writes over the gradients of the first",
        ARRANGEMENT,
        "gradient.target = GradTarget::kAdded;",
        "gradient.target = GradTarget::kPartial;",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: gradients that a server adds up come home rounded",
        ARRANGEMENT,
        "if (of_server < drafts_.size() && (is_own || !options_.reduces_narrow())) {",
        "if (of_server < drafts_.size()) {",
        (EXACT, CONSISTENT, REDUCED),
    ),
    Fault(
        "branches: a sum of a home alone waits for others",
        ARRANGEMENT,
        "has_own && contributions == 1, rows.row",
        "false, rows.row",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: what a group has added goes home again",
        SLICES,
        "if (g.home == rank_ || g.is_added()) return;",
        "if (g.home == rank_) return;",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: gradients leave before the last group has added to them",
        SLICES,
        "g.round, g.last_round, g.home, kind, -1, source",
        "g.round, group.round, g.home, kind, -1, source",
        (PLAN, CONSISTENT),
    ),
    Fault(
        "branches: a sum that is done has a term",
        "cpp/runtime/reduce_table.cpp",
        "if ((*term)->action != static_cast<int64_t>(ReceiveAction::kFinish))",
        "if (true)",
        (EXACT,),
    ),
    Fault(
        "branches: the CPU kernel writes where it should add",
        "cpp/attention/cpu_backward.cpp",
        "if (!run.is_added) {",
        "if (true) {",
        (EXACT,),
    ),
    Fault(
        "branches: groups of the CPU kernel add at the same time",
        "cpp/attention/cpu_attention.cpp",
        "for (const KeyGradRun& run : group.grads) place_of(run)->waves = wave + 1;",
        "",
        (STRESS,),
    ),
    Fault(
        "branches: CUDA: an item writes where it should add",
        "cuda/attention/backward_kernel.h",
        "if (run.is_added != 0)",
        "if (false)",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: an item adds before the one before it has written",
        "cuda/attention/backward_kernel.h",
        "if (item.before < 0) return;",
        "return;",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: an item waits for one that comes later",
        "cuda/attention/work_list.cpp",
        "if (has_families) order_families(problem, list);",
        "",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: groups that share some gradients may be of two families",
        "cuda/attention/work_list.cpp",
        "list.families[static_cast<size_t>(std::max(a, b))] = std::min(a, b);",
        "",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: groups that wait for no signal come before those that they add to",
        "cuda/attention/work_list.cpp",
        "remote[family] |= static_cast<uint8_t>(list.unsorted[first].remote);",
        "",
        (KERNELS,),
    ),
    Fault(
        "branches: ATen: a group writes where it should add",
        "cpp/torch/aten_backend.cpp",
        "run.is_added ? aten::add(place, aten::cast(rows, ScalarType::Float)) : rows",
        "rows",
        (FLASH,),
    ),
    Fault(
        "branches: a segment's keys are sent to a branch to its end",
        SLICES,
        "seen.end = std::min(segment.end, reader.end);",
        "seen.end = segment.end;",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: the bytes of a tree have a bound that nobody has proven",
        "cpp/plan/bounds.cpp",
        "layout.has_branches() || ",
        "",
        (LAYOUT,),
    ),
    Fault(
        "branches: a task of a plan may compute rows that its document shares",
        "cpp/plan/validate.cpp",
        "check_plan(branch == nullptr || t.q_begin >= branch->first_row,",
        "check_plan(true,",
        (CONSISTENT,),
    ),
    Fault(
        "branches: a plan may add gradients to those of other rows",
        "cpp/plan/consistency.cpp",
        "check_plan(!is_new && first.move.part == m.part && first.document == document && first.begin == r.begin,",
        "check_plan(true,",
        (CONSISTENT,),
    ),
    Fault(
        "branches: two groups of a plan may write gradients to one place",
        "cpp/plan/consistency.cpp",
        "check_plan(is_new, ",
        "check_plan(true, ",
        (CONSISTENT,),
    ),
    Fault(
        "branches: a plan may be done with a sum of others",
        "cpp/plan/validate.cpp",
        "check_plan(finishes == (r.peer == h().rank), ",
        "check_plan(true, ",
        (CONSISTENT,),
    ),
    Fault(
        "branches: backward may have other branches than forward",
        "cpp/runtime/context_plans.cpp",
        "x.document == plan::kPadding || branch_of(forward, x) == branch_of(backward, y);",
        "true;",
        (EXACT,),
    ),
    Fault(
        "branches: a half has the branches of a document that it has not",
        LAYOUTS,
        "trees_[static_cast<size_t>(document)] = path.back();",
        "trees_[static_cast<size_t>(document)] = path[path.size() > 1 ? 1 : 0];",
        (LAYOUT,),
    ),
    Fault(
        "branches: halves count the attention of shared rows for each branch",
        "python/distca/planner/halves.py",
        "more -= _visible_pairs(rows.start, window)",
        "more -= 0",
        (LAYOUT,),
    ),
    Fault(
        "branches: a chunk shares rows that lie before it",
        "python/distca/planner/layout.py",
        "if begin := own[document].start % rows:",
        "if begin := own[document].start:",
        (LAYOUT,),
    ),
    Fault(
        "branches: pickled layouts lose them",
        "python/distca/planner/layout.py",
        '_C.Layout(state["segments"], state.get("branches", []))',
        '_C.Layout(state["segments"], [])',
        (LAYOUT,),
    ),
    Fault(
        "branches: ranks may tell two parents of a document",
        "python/distca/planner/telling.py",
        "if branches.setdefault(numbers[document], numbers[parent]) != numbers[parent]:",
        "if branches.setdefault(numbers[document], numbers[parent]) is None:",
        (LAYOUT,),
    ),
    Fault(
        "branches: the first rank's numbers are those of the layout",
        "python/distca/planner/telling.py",
        "if branches.setdefault(numbers[document], numbers[parent])",
        "if branches.setdefault(document, parent)",
        (LAYOUT,),
    ),
    Fault(
        "branches: recurrent models take them",
        "python/distca/integrations/hf_models.py",
        "if layout is not None and layout.branches:",
        "if layout is None:",
        (MODELS,),
    ),
    Fault(
        "branches: a branch counts as cut where its own rows are whole",
        "python/distca/integrations/hf_recurrent.py",
        "if document != PADDING and range(begin, end) != own[document]:",
        "if document != PADDING and (begin, end) != (0, own[document].stop):",
        (MODELS,),
    ),
]
