//! Threads that wait for one disk, so that a slow disk delays only its own requests. The queue is bounded.

use crate::base::error::ErrorCode;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// Threads per target.
pub const THREADS: usize = 4;
/// Requests of one target that wait or run; more wait without taking a place, up to their deadline.
pub const QUEUE_JOBS_MAX: usize = 256;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The workers of one target.
pub struct Workers {
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// Starts the threads.
    pub fn start(name: &str, threads: usize, jobs_max: usize) -> io::Result<Self> {
        let workers =
            Self { shared: Arc::default(), places: Arc::new(Semaphore::new(jobs_max)), threads: Mutex::default() };
        for _ in 0..threads {
            let shared = workers.shared.clone();
            // On an error, dropping `workers` ends the threads that did start.
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared))?;
            workers.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        Ok(workers)
    }

    /// Runs `work` on a thread. `Overloaded`: no place in the queue within `wait`; then nothing was done.
    pub async fn run<T: Send + 'static>(
        &self,
        wait: Duration,
        work: impl FnOnce() -> Result<T, ErrorCode> + Send + 'static,
    ) -> Result<T, ErrorCode> {
        let place = match tokio::time::timeout(wait, self.places.clone().acquire_owned()).await {
            Ok(Ok(place)) => place,
            Ok(Err(_)) => return Err(ErrorCode::ShuttingDown),
            Err(_) => return Err(ErrorCode::Overloaded),
        };
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move || {
            let _place = place;
            // Nobody waits for it any more (the connection is gone): do not spend the disk's time.
            if !answer.is_closed() {
                let _ = answer.send(work());
            }
        });
        {
            let mut queue = self.shared.lock();
            if queue.closed {
                return Err(ErrorCode::ShuttingDown);
            }
            queue.jobs.push_back(job);
        }
        self.shared.wake.notify_one();
        answered.await.unwrap_or(Err(ErrorCode::Internal))
    }

    fn close(&self) {
        self.places.close();
        self.shared.lock().closed = true;
        self.shared.wake.notify_all();
    }

    /// Takes no new work, finishes what is queued, ends the threads.
    pub async fn shutdown(&self) {
        self.close();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let joined = tokio::task::spawn_blocking(move || threads.into_iter().all(|t| t.join().is_ok())).await;
        if !matches!(joined, Ok(true)) {
            tracing::error!("a storage thread ended by a fault");
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.close();
    }
}

fn run(shared: &Shared) {
    loop {
        let job = {
            let mut queue = shared.lock();
            loop {
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if queue.closed {
                    return;
                }
                queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        };
        job();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_full_queue_is_overloaded_after_the_deadline_and_shutdown_drains() {
        let workers = Arc::new(Workers::start("test", 1, 2).unwrap());
        let (go, gate) = mpsc::channel::<()>();
        let slow = {
            let workers = workers.clone();
            tokio::spawn(async move {
                workers.run(Duration::from_secs(5), move || gate.recv().map_err(|_| ErrorCode::Internal)).await
            })
        };
        let queued = {
            let workers = workers.clone();
            tokio::spawn(async move { workers.run(Duration::from_secs(5), || Ok(7)).await })
        };
        while workers.places.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(workers.run(Duration::from_millis(20), || Ok(())).await, Err(ErrorCode::Overloaded));
        let stopping = {
            let workers = workers.clone();
            tokio::spawn(async move { workers.shutdown().await })
        };
        go.send(()).unwrap();
        stopping.await.unwrap();
        assert_eq!(slow.await.unwrap(), Ok(()));
        assert_eq!(queued.await.unwrap(), Ok(7));
        assert_eq!(workers.run(Duration::from_secs(1), || Ok(())).await, Err(ErrorCode::ShuttingDown));
    }
}
