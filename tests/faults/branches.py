"""Faults of documents that share their first rows."""

from faults.fault import Fault

EXACT = "tests/runtime/test_branches.py"
LAYOUT = "tests/plan/test_branch_layouts.py"
PLAN = "tests/plan/test_plan.py"
CONSISTENT = "tests/plan/test_consistency.py"
MODELS = "tests/integrations/test_hf_branches.py"
ARRANGEMENT = "cpp/plan/arrangement.cpp"
LAYOUTS = "cpp/plan/layout.cpp"
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
        "branches: all that a home contributes is written into the sum",
        ARRANGEMENT,
        "if (group.server == g.home && g.is_first) {",
        "if (group.server == g.home) {",
        (EXACT, PLAN),
    ),
    Fault(
        "branches: further terms of a home are in fp32 where others are not",
        ARRANGEMENT,
        "options_.reduces_narrow() && i != own ?",
        "options_.reduces_narrow() && drafts_[i].target == GradTarget::kArena ?",
        (EXACT, CONSISTENT),
    ),
    Fault(
        "branches: a home forgets its further terms",
        SLICES,
        "if (g.sum >= 0 && !g.is_first) receive_gradient(g);",
        "",
        (EXACT, PLAN),
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
        "branches: a rank of a plan may add anything to its sums",
        "cpp/plan/consistency_messages.cpp",
        "if (terms[t]->peer != h_.rank) continue;",
        "continue;",
        (CONSISTENT, EXACT),
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
