/* The step protocol of cpp/runtime, for spin: three ranks, two slots, three steps or more, several plans and orders of
 * calls, those of a pipeline's ticks among them.
 *
 * Names are those of the code: `dispatch`, `attend` and `collect` are Dispatcher::begin, ::attend_rows and ::collect_rows;
 * what they call is in dispatcher.cpp and protocol.cpp. A loop here over peers with SENDS_... is a loop there over
 * slice.waits(phase) or slice.sends(phase). Checked are deadlock (by spin itself) and, by assertion, that
 *   - a server computes on rows of this step, and a home takes in results of this step, round and server, although
 *     results lie where rows to the server lay and where the next rows will lie, who begins a step writes over what the
 *     slot held, and a round lies over another server's rows of the round before;
 *   - a put finds at its source what its step left there, however late it is carried out;
 *   - no two signals to one word are under way at once, so that none is overwritten unseen, or by an older one.
 *
 * The network is weaker than any transport. What is under way arrives in any order, and a put reads its source when it
 * arrives. The one promise is that a message's signal comes after the message's own puts, of which each has two.
 *
 *   -DORDER=1        whole steps
 *   -DORDER=2        ping-pong, the parts in turn
 *   -DORDER=3        ping-pong, the next step is dispatched as soon as its slot is free
 *   -DORDER=4        the step that was dispatched last is finished first, and the next one gets its slot
 *   -DORDER=5        ticks in whole steps: a forward tick in which rank 2 only serves, a backward tick in which rank 0
 *                    does, and in which the layer is run again
 *   -DORDER=6        the same ticks in ping-pong
 *   -DORDER=7        a backward tick of two layers in ping-pong, each run again
 *   -DSTEPS=5        so many steps, of whole ones; with five a slot is used three times
 *   -DQUEUED         steps that are queued on streams: no slot is freed early
 *   -DALL_PLANS      every sequence of the plans below; else four: step n has plan (first + n) % 4
 *   -DFIRST=3        one of these
 *   -DSLOW_CREDITS   credit, and that a slot is free, are under way like a message; else they arrive at once. A
 *                    sender looks at credit only where it waits for it, so late credit is to it what being late
 *                    itself is; the rest is checked with this
 *   -DONE_PUT        messages have one put, which arrives at any time before the signal
 *   -DFAULT_...      plants a fault; tests/test_protocol_model.py requires that spin finds each
 */
#ifndef ORDER
#define ORDER 1
#endif
#if ORDER == 6
#define STEPS 6
#elif ORDER == 7
#define STEPS 8
#elif !defined(STEPS)
#define STEPS 3
#endif

/* sequence() of signals.h: step << 16 | round; a byte has room for one bit of rounds. */
#ifdef FAULT_ROUND_NOT_IN_VALUE
#define SEQUENCE(n, round) ((n) << 1)
#else
#define SEQUENCE(n, round) ((n) << 1 | (round))
#endif

/* A plan: bit (from, to) of `rows_in` says that home `from` sends rows to server `to`, of `rows_home` that server
 * `from` sends results to home `to`, in round 0 or 1. */
#define BIT(from, to) (1 << ((from) * 3 + (to)))
short rows_in[STEPS + 1], rows_home[(STEPS + 1) * 2];
#define SENDS_IN(n, from, to) (rows_in[n] & BIT(from, to))
#define SENDS_HOME(n, round, from, to) (rows_home[(n) * 2 + (round)] & BIT(from, to))

/* Protocol::slot(): of a step that this rank has begun. Credits::before(): the step that used its slot before, or 0. */
#define SLOT(n) slot_of[n]
#define BEFORE(n) before[n]

/* Home `from` may send in step n as soon as it knows that the slot is free: it sent in the slot's use before as well.
 * Both know that. */
#ifdef QUEUED
#define FREED_EARLY(n, from, to) false
#else
#define FREED_EARLY(n, from, to) SENDS_IN(BEFORE(n), from, to)
#endif
/* What belongs to rank `of` at rank `at`, by slot. */
#define CELL(at, slot, of) ((at) * 6 + (slot) * 3 + (of))
/* Where a server's rows of a round lie in home-in. */
#define HOME_CELL(at, slot, server, round) CELL(at, slot, ((server) + 3 - (at) + (round)) % 2)
#define RESULT(n, round, server) ((n) << 3 | (round) << 2 | (server))

/* Arenas. Each message has two puts, so two cells; a cell holds what was written there last, 0 once it is wiped. */
byte server_in_a[18], server_in_b[18]; /* step of the rows */
byte results[6];                       /* [rank, slot]: step of the results that the server made. Rows that arrive at
                                          the server lie over them. */
byte home_in_a[18], home_in_b[18];     /* RESULT(step, round, server) */
/* [rank, slot]: the step whose q, k, v the caller keeps as they are. */
byte tensors[6];

/* Signal words: signals_.credit(slot, peer), .freed(slot, peer), .arrived(slot, round, peer), .arrived_home(slot, peer).
   Here all rows to a server are in one round: those of several have a word each, and one credit. */
byte credit[18], freed[18], arrived_in[18], arrived_home[18];

/* Messages under way, by the word of their signal: bits 1 and 2: the puts, bit 4: the signal. */
byte pending_in[18], pending_home[18];
byte value_in[18], value_home[18];
byte pending_freed[18], value_freed[18];
#ifdef SLOW_CREDITS
byte pending_credit[18], value_credit[18];
#endif

#ifdef ONE_PUT
#define PUTS_AND_SIGNAL 5
#else
#define PUTS_AND_SIGNAL 7
#endif
/* Protocol::put and ::announce: hand a message to the network. */
#define SEND(pending, value, word, bits, v) \
  assert(pending[word] == 0); \
  pending[word] = bits; \
  value[word] = v

/* Nothing that a rank has put home from a slot is under way: quiet_until the last put of its step. Signals may be, and
 * other steps' puts. */
#define TO_COME_HOME(slot, from, to) (pending_home[CELL(to, slot, from)] & 3)
#define RESULTS_HAVE_LEFT(slot, from) \
  (!TO_COME_HOME(slot, from, 0) && !TO_COME_HOME(slot, from, 1) && !TO_COME_HOME(slot, from, 2))

/* Protocol::grant, ::grant_round; signal_after in ::end: */
#ifdef SLOW_CREDITS
#define GRANT(p, v) SEND(pending_credit, value_credit, CELL(p, SLOT(n), me), 4, v)
#define ARRIVES_AT_ONCE false
#else
#define GRANT(p, v) credit[CELL(p, SLOT(n), me)] = v
#define ARRIVES_AT_ONCE true
#endif
#ifdef FAULT_FREED_BEFORE_RESULTS_LEFT
#define MAY_FREE(slot, from) true
#else
#define MAY_FREE(slot, from) RESULTS_HAVE_LEFT(slot, from)
#endif
#define FREE(p, v) \
  if \
  :: ARRIVES_AT_ONCE && MAY_FREE(SLOT(n), me) -> freed[CELL(p, SLOT(n), me)] = v \
  :: else -> SEND(pending_freed, value_freed, CELL(p, SLOT(n), me), 4, v) \
  fi

/* ---- one rank ---- */

inline grant(n) {
  for (p : 0 .. 2) {
    if
    :: SENDS_IN(n, p, me) && !FREED_EARLY(n, p, me) || SENDS_HOME(n, 0, p, me) ->
       GRANT(p, SEQUENCE(n, 0))
#ifdef FAULT_GRANTED_TWICE
       ; if
       :: SENDS_IN(n, p, me) && SENDS_HOME(n, 0, p, me) ->
          GRANT(p, SEQUENCE(n, 0))
       :: else
       fi
#endif
    :: else
    fi
  }
}

inline grant_round(n, round) {
  for (p : 0 .. 2) {
    if
    :: SENDS_HOME(n, round, p, me) ->
       GRANT(p, SEQUENCE(n, round))
    :: else
    fi
  }
}

/* Protocol::begin takes the slot that is free; where both are, the one that the step before did not get. */
inline take_slot(n) {
#ifdef FAULT_ONE_SLOT
  SLOT(n) = 0;
#elif defined(FAULT_SLOT_BY_NUMBER)
  SLOT(n) = n % 2;
#else
  if
  :: !busy[1 - last_slot] -> SLOT(n) = 1 - last_slot
  :: else -> SLOT(n) = last_slot; assert(!busy[last_slot])
  fi;
#endif
  last_slot = SLOT(n);
  busy[last_slot] = true;
  BEFORE(n) = latest[last_slot];
  latest[last_slot] = n
}

/* What came home may be written over at the end of a step, and results once they have left. */
inline wipe_home(n) {
  for (p : 0 .. 2) {
    home_in_a[CELL(me, SLOT(n), p)] = 0;
    home_in_b[CELL(me, SLOT(n), p)] = 0
  }
}

inline open(n) {
  take_slot(n);
#ifndef FAULT_RESULTS_NOT_AWAITED
  RESULTS_HAVE_LEFT(SLOT(n), me);
#endif
  results[me * 2 + SLOT(n)] = 0;
  tensors[me * 2 + SLOT(n)] = n;
#ifdef FAULT_CREDIT_TOO_EARLY
  if
  :: n <= 2 -> grant(n)
  :: else
  fi
#else
  grant(n)
#endif
}

inline await_credit_in(n) {
#ifdef FAULT_NO_WAIT_FOR_CREDIT
  skip
#else
  if
  :: FREED_EARLY(n, me, p) -> freed[CELL(me, SLOT(n), p)] >= SEQUENCE(BEFORE(n), 0)
  :: else ->
#if STEPS > 3 && !defined(QUEUED) && !defined(FAULT_NO_WAIT_FOR_OLDER_SIGNAL)
     /* What came of an earlier use, and was not needed. */
     if
     :: BEFORE(n) && BEFORE(BEFORE(n)) && SENDS_IN(BEFORE(BEFORE(n)), me, p) ->
        freed[CELL(me, SLOT(n), p)] >= SEQUENCE(BEFORE(BEFORE(n)), 0)
     :: else
     fi;
#endif
     credit[CELL(me, SLOT(n), p)] >= SEQUENCE(n, 0)
  fi
#endif
}

inline dispatch_rows(n) {
  for (p : 0 .. 2) {
    if
    :: SENDS_IN(n, me, p) ->
       await_credit_in(n);
       SEND(pending_in, value_in, CELL(p, SLOT(n), me), PUTS_AND_SIGNAL, SEQUENCE(n, 0))
    :: else
    fi
  }
}

inline await_rows_in(n) {
  for (p : 0 .. 2) {
    if
#ifdef FAULT_WAITS_FOR_ALL
    :: p != me ->
#else
    :: SENDS_IN(n, p, me) ->
#endif
       arrived_in[CELL(me, SLOT(n), p)] >= SEQUENCE(n, 0)
    :: else
    fi
  }
}

inline compute(n) {
  for (p : 0 .. 2) {
    if
    :: SENDS_IN(n, p, me) ->
       assert(server_in_a[CELL(me, SLOT(n), p)] == n && server_in_b[CELL(me, SLOT(n), p)] == n)
    :: else
    fi
  }
  results[me * 2 + SLOT(n)] = n
}

inline send_home(n, round) {
  for (p : 0 .. 2) {
    if
    :: SENDS_HOME(n, round, me, p) ->
#ifdef FAULT_NO_WAIT_FOR_ROUND_CREDIT
       credit[CELL(me, SLOT(n), p)] >= SEQUENCE(n, 0);
#else
       credit[CELL(me, SLOT(n), p)] >= SEQUENCE(n, round); /* await_credit */
#endif
       SEND(pending_home, value_home, CELL(p, SLOT(n), me), PUTS_AND_SIGNAL, SEQUENCE(n, round))
    :: else
    fi
  }
}

inline await_rows_home(n, round) {
  for (p : 0 .. 2) {
    if
    :: SENDS_HOME(n, round, p, me) -> arrived_home[CELL(me, SLOT(n), p)] >= SEQUENCE(n, round)
    :: else
    fi
  }
}

/* The second half of receive_home. */
inline collect_rows(n, round) {
  for (p : 0 .. 2) {
    if
    :: SENDS_HOME(n, round, p, me) ->
       assert(home_in_a[HOME_CELL(me, SLOT(n), p, round)] == RESULT(n, round, p) &&
              home_in_b[HOME_CELL(me, SLOT(n), p, round)] == RESULT(n, round, p))
    :: else
    fi
  }
}

inline free(n) {
  for (p : 0 .. 2) {
    if
    :: SENDS_IN(n, p, me) -> FREE(p, SEQUENCE(n, 0))
    :: else
    fi
  }
}

/* Protocol::end; then the caller may change its tensors. */
inline protocol_end(n) {
#ifndef FAULT_NO_QUIET
  for (p : 0 .. 2) { /* quiet_until the last put of the dispatch */
    !(pending_in[CELL(p, SLOT(n), me)] & 3)
  }
#endif
  tensors[me * 2 + SLOT(n)] = 0;
  wipe_home(n);
#if !defined(QUEUED) && !defined(FAULT_FREED_TOO_EARLY)
  free(n);
#endif
  busy[SLOT(n)] = false
}

/* The calls of a rank, in order: 10 * part + step; the last is none. */
#define D(n) n
#define A(n) 1##n
#define C(n) 2##n
#define STEP(n) D(n), A(n), C(n)
#define NUM_CALLS 3 * STEPS + 1
#if STEPS == 3
#define WHOLE_STEPS {STEP(1), STEP(2), STEP(3), 0}
#else
#define WHOLE_STEPS {STEP(1), STEP(2), STEP(3), STEP(4), STEP(5), 0}
#endif
/* Two halves of one layer. */
#define TWO_STEPS(m, n) D(m), D(n), A(m), A(n), C(m), C(n)
#if ORDER == 1 || ORDER == 5
byte calls[NUM_CALLS] = WHOLE_STEPS;
#elif ORDER == 2
byte calls[NUM_CALLS] = {D(1), D(2), A(1), A(2), C(1), C(2), D(3), A(3), C(3), 0};
#elif ORDER == 3
byte calls[NUM_CALLS] = {D(1), D(2), A(1), C(1), D(3), A(2), C(2), A(3), C(3), 0};
#elif ORDER == 4
byte calls[NUM_CALLS] = {D(1), D(2), A(2), C(2), D(3), A(3), A(1), C(3), C(1), 0};
#elif ORDER == 6
/* Steps 3 and 5 run a half's layer again, right before 4 and 6 begin its backward. */
byte calls[NUM_CALLS] = {TWO_STEPS(1, 2), STEP(3), D(4), STEP(5), D(6), A(4), A(6), C(4), C(6), 0};
#elif ORDER == 7
byte calls[NUM_CALLS] = {STEP(1), D(2), STEP(3), D(4), A(2), A(4), C(2), STEP(5), D(6), C(4), STEP(7), D(8),
                         A(6), A(8), C(6), C(8), 0};
#endif
#ifdef FAULT_ORDERS_DIFFER
#define CALLS_OF_RANK_0 WHOLE_STEPS
/* Rank 0 serves in the backward tick. It numbers its steps by its own count, as the code does. */
#elif defined(FAULT_NO_RECOMPUTATION_SERVED) && ORDER == 5
#define CALLS_OF_RANK_0 {STEP(1), STEP(2), 0}
#elif defined(FAULT_NO_RECOMPUTATION_SERVED)
#define CALLS_OF_RANK_0 {TWO_STEPS(1, 2), TWO_STEPS(3, 4), 0}
#elif defined(FAULT_ONE_STEP_TOO_FEW_SERVED)
#define CALLS_OF_RANK_0 {TWO_STEPS(1, 2), STEP(3), D(4), D(5), A(4), A(5), C(4), C(5), 0}
#elif defined(FAULT_RECOMPUTATION_SERVED_FIRST)
#define CALLS_OF_RANK_0 {TWO_STEPS(1, 2), STEP(3), STEP(4), TWO_STEPS(5, 6), 0}
#elif defined(FAULT_HALVES_SERVED_APART)
#define CALLS_OF_RANK_0 {TWO_STEPS(1, 2), STEP(3), STEP(4), STEP(5), STEP(6), 0}
#endif
#ifdef CALLS_OF_RANK_0
byte calls_of_rank_0[NUM_CALLS] = CALLS_OF_RANK_0;
#define CALL(i) (me == 0 -> calls_of_rank_0[i] : calls[i])
#else
#define CALL(i) calls[i]
#endif

inline next_call() {
  i++;
  call = CALL(i - 1) / 10;
  step = CALL(i - 1) % 10
}

/* What happens elsewhere meanwhile happens between two atomic blocks, or while one of them waits. */
proctype Rank(byte me) {
  byte p, i, call, step, last_slot;
  byte slot_of[STEPS + 1], before[STEPS + 1], latest[2];
  bool busy[2];
  atomic { next_call() }
  do
  :: atomic {
       call == 0 && step > 0 -> /* dispatch */
       open(step);
       dispatch_rows(step);
       next_call()
     }
  :: atomic {
       call == 1 -> /* attend */
       await_rows_in(step)
     }
#ifdef FAULT_CREDIT_TOO_EARLY
     atomic {
       if
       :: step + 2 <= STEPS -> SLOT(step + 2) = SLOT(step); grant(step + 2)
       :: else
       fi
     }
#endif
#ifdef FAULT_FREED_TOO_EARLY
     atomic { free(step) }
#endif
     atomic {
       compute(step);
#ifdef FAULT_RECEIVES_BEFORE_IT_SENDS
       await_rows_home(step, 0);
#endif
       send_home(step, 0);
       next_call()
     }
  :: atomic {
       call == 2 -> /* collect */
#ifdef FAULT_ROUND_CREDIT_TOO_EARLY
       grant_round(step, 1);
#endif
       await_rows_home(step, 0)
     }
     atomic {
       collect_rows(step, 0);
#if !defined(FAULT_NO_ROUND_CREDIT) && !defined(FAULT_ROUND_CREDIT_TOO_EARLY)
       grant_round(step, 1);
#endif
       send_home(step, 1);
       await_rows_home(step, 1)
     }
     atomic {
       collect_rows(step, 1);
       protocol_end(step);
       next_call()
     }
  :: step == 0 -> break
  od
}

/* ---- the network ---- */

/* A put of rows to a server reads the sender's tensors, one of results reads its arena: both may be gone by then. */
#define ROWS_IN(at, slot, from) tensors[from * 2 + slot]
#define ROWS_HOME(at, slot, from) \
  RESULT(results[from * 2 + slot], value_home[CELL(at, slot, from)] % 2, from)
#define CELL_IN(at, slot, from) CELL(at, slot, from)
#define CELL_HOME(at, slot, from) HOME_CELL(at, slot, from, value_home[CELL(at, slot, from)] % 2)

#ifdef FAULT_SIGNALS_ADD
#define WRITE(word, value) word = word + value
#else
#define WRITE(word, value) word = value
#endif
#define ARRIVES(pending, words, value, at, slot, from) \
       WRITE(words[CELL(at, slot, from)], value[CELL(at, slot, from)]); \
       value[CELL(at, slot, from)] = 0; \
       pending[CELL(at, slot, from)] = 0

#ifdef FAULT_SIGNAL_OVERTAKES_PUT
#define MAY_SIGNAL(pending) (pending >= 4)
#else
#define MAY_SIGNAL(pending) (pending == 4)
#endif
#ifdef ONE_PUT
#define WITH_IT(bit) (bit == 1)
#else
#define WITH_IT(bit) false
#endif
#define WRITE_OVER_RESULTS(at, slot, from) results[(at) * 2 + (slot)] = 0
/* Where signals arrive at once, those that waited for the results of a slot to leave do so with the last of these. */
#define FREE_AT_ONCE(at, slot, from) \
  if \
  :: ARRIVES_AT_ONCE && RESULTS_HAVE_LEFT(slot, from) -> \
     FREED_NOW(0, slot, from); \
     FREED_NOW(1, slot, from); \
     FREED_NOW(2, slot, from) \
  :: else \
  fi
#define FREED_NOW(at, slot, from) \
  if \
  :: pending_freed[CELL(at, slot, from)] -> \
     ARRIVES(pending_freed, freed, value_freed, at, slot, from) \
  :: else \
  fi
#define PUT(bit, at, slot, from, pending, rows, cell, cells, others, then) \
  :: d_step { pending[CELL(at, slot, from)] & bit -> \
       cells[cell(at, slot, from)] = rows(at, slot, from); \
       if \
       :: WITH_IT(bit) -> others[cell(at, slot, from)] = rows(at, slot, from) \
       :: else \
       fi; \
       pending[CELL(at, slot, from)] = pending[CELL(at, slot, from)] - bit; \
       then(at, slot, from) }
#define MESSAGE(at, slot, from, pending, value, words, rows, cell, cells_a, cells_b, then) \
  PUT(1, at, slot, from, pending, rows, cell, cells_a, cells_b, then) \
  PUT(2, at, slot, from, pending, rows, cell, cells_b, cells_a, then) \
  :: d_step { MAY_SIGNAL(pending[CELL(at, slot, from)]) -> \
       ARRIVES(pending, words, value, at, slot, from) }
#ifdef SLOW_CREDITS
#define CREDIT(at, slot, from) \
  :: d_step { pending_credit[CELL(at, slot, from)] -> \
       ARRIVES(pending_credit, credit, value_credit, at, slot, from) } \
  :: d_step { pending_freed[CELL(at, slot, from)] && MAY_FREE(slot, from) -> \
       ARRIVES(pending_freed, freed, value_freed, at, slot, from) }
#else
#define CREDIT(at, slot, from)
#endif

#define BETWEEN(at, slot, from) \
  MESSAGE(at, slot, from, pending_in, value_in, arrived_in, ROWS_IN, CELL_IN, server_in_a, server_in_b, \
          WRITE_OVER_RESULTS) \
  MESSAGE(at, slot, from, pending_home, value_home, arrived_home, ROWS_HOME, CELL_HOME, home_in_a, home_in_b, \
          FREE_AT_ONCE) \
  CREDIT(at, slot, from)

proctype Network() {
end:
  do
  BETWEEN(0, 0, 1)
  BETWEEN(0, 0, 2)
  BETWEEN(0, 1, 1)
  BETWEEN(0, 1, 2)
  BETWEEN(1, 0, 0)
  BETWEEN(1, 0, 2)
  BETWEEN(1, 1, 0)
  BETWEEN(1, 1, 2)
  BETWEEN(2, 0, 0)
  BETWEEN(2, 0, 1)
  BETWEEN(2, 1, 0)
  BETWEEN(2, 1, 1)
  od
}

inline plan(n, in, round_0, round_1) {
  rows_in[n] = in;
  rows_home[(n) * 2] = round_0;
  rows_home[(n) * 2 + 1] = round_1
}

#define PLANS 4
/* In ticks: so many steps of the forward tick; then steps that run a layer again and steps of backward take turns. */
#if ORDER == 5
#define FORWARD_STEPS 1
#elif ORDER == 6
#define FORWARD_STEPS 2
#else
#define FORWARD_STEPS 0
#endif
#define FORWARD_TICK 4
#define RUN_AGAIN 5
#define BACKWARD_TICK 6
inline choose(n, which) {
  if
  /* A home lends to both others; what one sends in round 1 lies over what the other sent in round 0. */
  :: which == 0 -> plan(n, BIT(0, 1) | BIT(0, 2), BIT(1, 0) | BIT(2, 0), BIT(2, 0))
  /* A ring in one round, as in forward. */
  :: which == 1 -> plan(n, BIT(0, 1) | BIT(1, 2) | BIT(2, 0), BIT(1, 0) | BIT(2, 1) | BIT(0, 2), 0)
  /* Two ranks lend to each other, with two rounds. */
  :: which == 2 -> plan(n, BIT(0, 1) | BIT(1, 0), BIT(0, 1) | BIT(1, 0), BIT(0, 1) | BIT(1, 0))
  /* Two homes lend to one server, which sends nothing to one and to the other only in round 1; none sends in round 0. */
  :: which == 3 -> plan(n, BIT(1, 2) | BIT(0, 2), 0, BIT(2, 0))
  /* Rank 2 is of an idle stage. Both others lend to it, and one to the other. */
  :: which == FORWARD_TICK -> plan(n, BIT(0, 2) | BIT(1, 2) | BIT(0, 1), BIT(2, 0) | BIT(2, 1) | BIT(1, 0), 0)
  /* The same with rank 0. What is run again has one round, as forward has. */
  :: which == RUN_AGAIN -> plan(n, BIT(1, 0) | BIT(2, 0) | BIT(2, 1), BIT(0, 1) | BIT(0, 2) | BIT(1, 2), 0)
  :: which == BACKWARD_TICK -> plan(n, BIT(1, 0) | BIT(2, 0) | BIT(2, 1), BIT(0, 1) | BIT(1, 2), BIT(0, 2))
  fi
}

init {
  byte n, first;
  atomic {
#ifdef FIRST
    first = FIRST;
#elif ORDER < 5
    select(first : 0 .. PLANS - 1);
#endif
    for (n : 1 .. STEPS) {
#if ORDER >= 5
      if
      :: n <= FORWARD_STEPS -> choose(n, FORWARD_TICK)
      :: n > FORWARD_STEPS && (n - FORWARD_STEPS) % 2 == 1 -> choose(n, RUN_AGAIN)
      :: n > FORWARD_STEPS && (n - FORWARD_STEPS) % 2 == 0 -> choose(n, BACKWARD_TICK)
      fi
#elif defined(ALL_PLANS)
      select(first : 0 .. PLANS - 1);
      choose(n, first)
#else
      choose(n, (first + n) % PLANS)
#endif
    }
    run Network();
    run Rank(0);
    run Rank(1);
    run Rank(2)
  }
}
