// Worker threads, shared by all native kernels of a process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Time since it began, passed in a way that leaves the core to whoever wants it.
class Patience {
   public:
    using Clock = std::chrono::steady_clock;
    bool lasts(std::chrono::microseconds limit) const { return Clock::now() - start_ < limit; }
    void pass() {
        if (rounds_++ < 64) {  // some microseconds: the usual wait between two kernels' parts
#if defined(__SSE2__)
            _mm_pause();
#endif
        } else {
            std::this_thread::yield();
        }
    }

   private:
    Clock::time_point start_ = Clock::now();
    int64_t rounds_ = 0;
};

// Workers look for the next job for a while, then sleep: between the kernels of a step they are
// there at once, between steps they take no CPU. One job at a time. A job that its caller finishes
// alone, because no worker got a core, is over: late workers find it closed.
class Pool {
   public:
    static Pool& instance() {  // one a process: the linker unites it over all kernel libraries
        static Pool* pool = new Pool;  // never destroyed: workers may outlive main
        return *pool;
    }
    // body(i) for i in [0, count), each once, by up to `threads` threads.
    void run(int64_t count, int64_t threads, const std::function<void(int64_t)>& body) {
        std::lock_guard<std::mutex> one(busy_);
        for (; hired_ < threads - 1; hired_++)
            std::thread([this, number = hired_] { work(number); }).detach();
        body_ = &body, count_ = count, helpers_ = threads - 1, next_ = 0;
        open_ = ++last_;
        if (sleeping_) {
            { std::lock_guard<std::mutex> guard(lock_); }
            wake_.notify_all();
        }
        drain(body, count);
        open_ = 0;
        Patience patience;
        while (active_) {
            patience.pass();
            if (!patience.lasts(LONG)) std::this_thread::sleep_for(NAP);
        }
    }

   private:
    static constexpr std::chrono::microseconds SPIN{60}, LONG{500}, NAP{50};

    void drain(const std::function<void(int64_t)>& body, int64_t count) {
        for (int64_t i; (i = next_.fetch_add(1)) < count;) body(i);
    }
    void work(int64_t number) {
        for (uint64_t job = 0;;) {
            job = await(job);
            // The caller waits for active workers after closing; both orders are sequentially
            // consistent, so a job that is open here lasts until this worker has left it.
            active_++;
            if (open_ == job && number < helpers_) drain(*body_, count_);
            active_--;
        }
    }
    uint64_t await(uint64_t seen) {
        uint64_t job;
        auto is_new = [&] { return (job = open_) != 0 && job != seen; };
        for (Patience patience; patience.lasts(SPIN); patience.pass())
            if (is_new()) return job;
        std::unique_lock<std::mutex> guard(lock_);
        sleeping_++;
        wake_.wait(guard, is_new);
        sleeping_--;
        return job;
    }
    std::mutex busy_, lock_;
    std::condition_variable wake_;
    std::atomic<uint64_t> open_{0};  // number of the job that runs, or 0
    std::atomic<int64_t> next_{0}, active_{0}, sleeping_{0};
    const std::function<void(int64_t)>* body_ = nullptr;
    int64_t count_ = 0, helpers_ = 0, hired_ = 0;
    uint64_t last_ = 0;
};
