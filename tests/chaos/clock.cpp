// Preloaded into every process of a mesh: the wall clock jumps when a file says so.
//
// CHAOS_CLOCK names a file that holds one int64: nanoseconds that are added to the wall clock. The
// monotonic clock stays what it is. Waits that are given as a time of day are shifted back, for the
// kernel knows nothing of the jump.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr int64_t kSecond = 1000000000;

const volatile int64_t *map_offset() {
    static const int64_t none = 0;
    const char *path = getenv("CHAOS_CLOCK");
    int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return &none;
    void *mapped = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? &none : static_cast<const volatile int64_t *>(mapped);
}

int64_t offset() {
    static const volatile int64_t *at = map_offset();
    return *at;
}

template <typename F> F next(const char *name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

timespec shifted(const timespec &from, int64_t by) {
    int64_t all = from.tv_sec * kSecond + from.tv_nsec + by;
    timespec to;
    to.tv_sec = all / kSecond - (all % kSecond < 0);
    to.tv_nsec = all - to.tv_sec * kSecond;
    return to;
}

bool is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec *now) noexcept {
    static auto real = next<int (*)(clockid_t, timespec *)>("clock_gettime");
    int status = real(clock, now);
    if (status == 0 && is_wall(clock)) *now = shifted(*now, offset());
    return status;
}

int gettimeofday(timeval *now, void *) noexcept {
    timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) noexcept {
    timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (out != nullptr) *out = fine.tv_sec;
    return fine.tv_sec;
}

int timespec_get(timespec *now, int base) noexcept {
    if (base != TIME_UTC) return 0;
    clock_gettime(CLOCK_REALTIME, now);
    return base;
}

int sem_timedwait(sem_t *semaphore, const timespec *until) {
    static auto real = next<int (*)(sem_t *, const timespec *)>("sem_timedwait");
    timespec ours = shifted(*until, -offset());
    return real(semaphore, &ours);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const timespec *until) noexcept {
    static auto real = next<int (*)(pthread_mutex_t *, const timespec *)>("pthread_mutex_timedlock");
    timespec ours = shifted(*until, -offset());
    return real(mutex, &ours);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock,
                           const timespec *until) {
    static auto real = next<int (*)(pthread_cond_t *, pthread_mutex_t *, clockid_t,
                                    const timespec *)>("pthread_cond_clockwait");
    timespec ours = shifted(*until, is_wall(clock) ? -offset() : 0);
    return real(cond, mutex, clock, &ours);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const timespec *until) {
    // glibc keeps the clock of a condition in this bit; clockwait has no old version to mistake.
    bool is_monotonic = cond->__data.__wrefs & 2;
    return pthread_cond_clockwait(cond, mutex, is_monotonic ? CLOCK_MONOTONIC : CLOCK_REALTIME,
                                  until);
}

}  // extern "C"
