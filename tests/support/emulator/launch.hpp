// Runs blocks one after another, the fibers of each in random order.
#pragma once

#include "copies.hpp"
#include "products.hpp"

namespace emulator {

inline void enter() {
    block->kernel();
    if (!current->open_group.empty()) fail("products without a committed group");
    current->done = true;
    block->progress++;
    for (;;) yield("nothing");
}
inline void prepare(unsigned threads, unsigned index, unsigned seed) {
    block->threads = std::vector<Thread>(threads);
    block->warps = std::vector<Warp>(threads / 32);
    block->index = index;
    block->random.seed(seed + index);
    memset(block->shared, 0xff, kSharedBytes);
    for (unsigned i = 0; i < threads; i++) {
        Thread& thread = block->threads[i];
        thread.index.x = i;
        getcontext(&thread.first);
        thread.first.uc_stack.ss_sp = thread.stack.get();
        thread.first.uc_stack.ss_size = kStackBytes;
        thread.first.uc_link = nullptr;
        makecontext(&thread.first, enter, 0);
    }
}
template <typename Pending>
void land_some(std::vector<Pending>& pending) {
    std::shuffle(pending.begin(), pending.end(), block->random);
    auto due = std::partition(pending.begin(), pending.end(), [](const Pending&) { return block->random() % 4 != 0; });
    std::for_each(due, pending.end(), [](const Pending& one) { land(one); });
    pending.erase(due, pending.end());
}
inline std::string waits() {
    std::map<std::string, std::string> waiting;  // thread numbers by what they wait for
    for (Thread& thread : block->threads)
        if (!thread.done) waiting[thread.waits_for + std::to_string(thread.which)] += " " + std::to_string(thread.index.x);
    std::string text;
    for (auto& [what, who] : waiting) text += what + ":" + who.substr(0, 40) + "; ";
    return text;
}
inline std::string run_block() {
    std::vector<Thread*> order;
    for (Thread& thread : block->threads) order.push_back(&thread);
    long long seen = -1;
    for (int patience = kPatience; !order.empty() && block->fault.empty(); patience--) {
        if (block->progress != seen) seen = block->progress, patience = kPatience;
        if (!patience) return "deadlock: all threads wait: " + waits();
        if (block->random() % 8 == 0) std::shuffle(order.begin(), order.end(), block->random);
        for (Thread* thread : order) resume(*thread);
        current = &block->threads[0];
        land_some(block->copies);
        land_some(block->arrivals);
        order.erase(std::remove_if(order.begin(), order.end(), [](Thread* one) { return one->done; }), order.end());
    }
    if (block->fault.empty() && !(block->copies.empty() && block->arrivals.empty())) return "no thread waited for some tensor copies";
    return block->fault;
}

template <typename... Arguments, size_t... Index>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<Index...>) {
    kernel(*static_cast<std::remove_cv_t<Arguments>*>(arguments[Index])...);
}
// Runs all blocks of a launch; returns an empty string or the error.
template <typename... Arguments>
std::string launch(void (*kernel)(Arguments...), void** arguments, unsigned grid, unsigned threads, unsigned seed) {
    for (unsigned index = 0; index < grid; index++) {
        auto own = std::make_unique<Block>();
        block = own.get();
        block->grid = grid;
        block->kernel = [=] { call(kernel, arguments, std::index_sequence_for<Arguments...>()); };
        prepare(threads, index, seed);
        std::string fault = run_block();
        if (!fault.empty()) return "block " + std::to_string(index) + ", " + fault;
    }
    return "";
}

}  // namespace emulator
