"""Faults of the control transport over TCP."""

from faults.fault import Fault

WORDS = "tests/transport/test_tcp.py"
CONNECTING = "tests/transport/test_tcp_connect.py"

FAULTS = [
    Fault(
        "a connection may join without the token",
        "cpp/transport/tcp_mesh.cpp",
        "if (hello.magic == kCall && hello.to_token == listener_.address.token) return",
        "if (hello.magic == kCall) return",
        (CONNECTING,),
    ),
    Fault(
        "a connection that breaks is not a death",
        "cpp/transport/tcp.cpp",
        "    if (is_present(peer)) region(peer).set_state(RankState::kDied);\n",
        "",
        (WORDS,),
    ),
    Fault(
        "the word of a question is not checked",
        "cpp/transport/tcp.cpp",
        "return has_words(message.word, message.count) && answer(peer, message);",
        "return answer(peer, message);",
        (WORDS,),
    ),
    Fault(
        "a peek does not wait for its answer",
        "cpp/transport/tcp.cpp",
        "    thread_.done().wait_for(lock, kPatience, [&] { return !peer.owes_answer() || !is_present(from); });\n",
        "",
        (WORDS,),
    ),
    Fault(
        "a rank closes without a goodbye",
        "cpp/transport/tcp.cpp",
        "static_cast<void>(post(peer, {.kind = Kind::kGoodbye}));",
        "peer.has_read_goodbye = true;",
        (WORDS,),
    ),
    Fault(
        "what is on a link is lost when its rank closes",
        "cpp/emulation/link.cpp",
        "  if (!thread_.is_forked()) await_delivery(num_sent_);\n",
        "",
        (WORDS,),
    ),
]
